"""The columns of the list of topics: what each shows, and which of them a terminal of some width has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from heapline.cli.present import size
from heapline.cli.top.figures import age, bar, millis, short, sparkline
from heapline.cli.top.model import Rates, TopicWatch

NAME_MIN, NAME_MAX = 16, 40
CURVE_MIN, CURVE_MAX = 8, 30
IN, OUT, READY, DELAYED, LEASED, DEAD, QUIET = "cyan", "green", "bold", "blue", "yellow", "bold red", "bright_black"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    width: int
    show: Callable[[TopicWatch, int, int], Text]  # the topic, the column's width, the largest backlog of all
    sort: str = ""  # the order that this column tells
    grows: bool = False  # takes room that is left over


def number(value: float | None, style: str) -> Text:
    """What is nothing stands back."""
    return Text(short(value), style=style if value else QUIET)


def _rate(pick: Callable[[Rates], float], style: str) -> Callable[[TopicWatch, int, int], Text]:
    return lambda t, _w, _m: number(None if t.rates is None else pick(t.rates), style)


def _depth(pick: str, style: str) -> Callable[[TopicWatch, int, int], Text]:
    return lambda t, _w, _m: number(getattr(t.stats, pick) if t.stats else None, style)


def _oldest(t: TopicWatch, _w: int, _m: int) -> Text:
    value = t.stats.oldest_ready_age if t.stats else None
    return Text(age(value), style="" if value is not None else QUIET)


def _lease_end(t: TopicWatch, _w: int, _m: int) -> Text:
    value = t.stats.lease_ends_in if t.stats else None
    return Text(age(value), style=LEASED if value is not None else QUIET)


def _backlog(t: TopicWatch, width: int, largest: int) -> Text:
    """Ready and delayed, next to the topic that has most."""
    if t.stats is None or not largest:
        return Text()
    ready, all = t.stats.ready, t.stats.ready + t.stats.delayed
    drawn = bar(all / largest, width)
    cut = round(len(drawn) * ready / all) if all else 0
    return Text(drawn[:cut], style="magenta") + Text(drawn[cut:], style=DELAYED)


#: From left to right, after the name.
COLUMNS = (
    Column("READY", 6, _depth("ready", READY), "ready"),
    Column("DELAY", 6, _depth("delayed", DELAYED), "delayed"),
    Column("LEASED", 6, _depth("leased", LEASED), "leased"),
    Column("DEAD", 5, _depth("dead", DEAD), "dead"),
    Column("BACKLOG", 12, _backlog),
    Column("IN/S", 6, _rate(lambda r: r.enqueued, IN), "in"),
    Column("IN", CURVE_MIN, lambda t, w, _m: Text(sparkline(list(t.entered), w), style=IN), grows=True),
    Column("OUT/S", 6, _rate(lambda r: r.acked, OUT), "out"),
    Column("OUT", CURVE_MIN, lambda t, w, _m: Text(sparkline(list(t.left), w), style=OUT), grows=True),
    Column("FAIL/S", 6, _rate(lambda r: r.nacked + r.timeouts, "red")),
    Column("OLDEST", 6, _oldest, "oldest"),
    Column("DUE10S", 6, lambda t, _w, _m: number(t.due_within(10), DELAYED)),
    Column("DUE 1M", 6, lambda t, _w, _m: number(t.due_within(60), DELAYED), "due"),
    Column("LEASE", 6, _lease_end),
    Column("COMMIT99", 8, lambda t, _w, _m: Text(millis(t.latency("commit").p99), style=QUIET)),
    Column("DISK", 9, lambda t, _w, _m: Text(size(t.stats.journal_bytes) if t.stats else "", style=QUIET)),
)
#: The same by how much they are missed if they are not there.
IMPORTANCE = (
    "READY", "IN/S", "OUT/S", "LEASED", "DEAD", "DELAY", "OLDEST", "IN", "DUE10S", "OUT", "DUE 1M", "LEASE", "FAIL/S",
    "COMMIT99", "BACKLOG", "DISK",
)  # fmt: skip


def choose(width: int, names: Sequence[str], *, with_curves: bool = True) -> tuple[int, list[tuple[Column, int]]]:
    """How wide the names are, and which columns there are with their widths; one space stands between two."""
    longest = max((len(name) for name in names), default=0)
    wanted: set[str] = set()
    left = width - NAME_MIN
    for name in IMPORTANCE:
        column = next(c for c in COLUMNS if c.name == name)
        if column.grows and not with_curves:
            continue
        if left < column.width + 1:
            break
        wanted.add(name)
        left -= column.width + 1
    for_name = min(left, max(0, min(longest, NAME_MAX) - NAME_MIN))
    left -= for_name
    growing = [c.name for c in COLUMNS if c.grows and c.name in wanted]
    more = min(CURVE_MAX - CURVE_MIN, left // len(growing)) if growing else 0
    widths = [(c, c.width + (more if c.grows else 0)) for c in COLUMNS if c.name in wanted]
    return NAME_MIN + for_name, widths
