"""The columns of the list of topics, and how numbers, ages and curves fit into narrow columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from heapline.cli.output import millis, size
from heapline.cli.top.sampler import Rates, TopicWatch

BLOCKS = " ▁▂▃▄▅▆▇█"
NAME_MIN, NAME_MAX = 16, 40
CURVE_MIN, CURVE_MAX = 8, 30
IN, OUT, READY, DELAYED, LEASED, DEAD, QUIET = "cyan", "green", "bold", "blue", "yellow", "bold red", "bright_black"


# -- numbers and curves ------------------------------------------------------------------------------------------------


def short(number: float | None) -> str:
    """Return at most five characters; exact up to 9999.

    >>> [short(n) for n in (0, 0.25, 9999, 12345, 999_950, 1_234_567, None)]
    ['0', '0.2', '9999', '12.3k', '1.00M', '1.23M', '–']
    """
    if number is None:
        return "–"
    if number < 9.95 and number != int(number):
        return f"{number:.1f}"
    if number < 9999.5:
        return str(round(number))
    value = float(number)
    for unit in "kMGTPE":
        value /= 1000
        for limit, digits in ((9.995, 2), (99.95, 1), (999.5, 0)):
            if value < limit:
                return f"{value:.{digits}f}{unit}"
    return "many"


def age(seconds: float | None) -> str:
    """Return at most five characters.

    >>> [age(s) for s in (0.04, 9.94, 59.7, 192, 7500, 273_600, None)]
    ['40ms', '9.9s', '1m00', '3m12', '2h05', '3d04', '–']
    """
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    minutes, hours, days = rounded // 60, rounded // 3600, rounded // 86400
    if hours < 1:
        return f"{minutes}m{rounded % 60:02d}"
    if days < 1:
        return f"{hours}h{minutes % 60:02d}"
    return f"{days}d{hours % 24:02d}" if days < 100 else f"{days}d"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the last values as a line of blocks, the newest on the right. Unknown values are blank.

    >>> sparkline([None, 0, 1, 4, 8], 6)
    '  ▁▁▄█'
    """
    return chart(values, width, 1)[0]


def chart(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """Return a sparkline over several lines, the topmost first."""
    if width < 1:
        return [""] * height
    shown = [None] * max(0, width - len(values)) + list(values[-width:])
    highest = max((value for value in shown if value), default=0.0)
    eighths = [_eighths(value, highest, height * 8) for value in shown]
    rows = range(height - 1, -1, -1)
    return ["".join(BLOCKS[min(8, max(0, level - row * 8))] for level in eighths) for row in rows]


def _eighths(value: float | None, highest: float, limit: int) -> int:
    if value is None:
        return 0
    return max(1, round(value / highest * limit)) if highest else 1


def bar(share: float, width: int) -> str:
    """
    >>> bar(0.5, 5), bar(0.001, 5)
    ('██▌', '▏')
    """
    eighths = round(share * width * 8)
    full, rest = divmod(max(1, eighths) if share > 0 else 0, 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[rest].strip()


def number(value: float | None, style: str) -> Text:
    """Return a number; zero and unknown values are dim."""
    return Text(short(value), style=style if value else QUIET)


# -- columns -----------------------------------------------------------------------------------------------------------

Cell = Callable[[TopicWatch, int, int], Text]  # the topic, the width of the column, the largest backlog of all topics


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    width: int
    show: Cell
    sort: str = ""  # the sort order that belongs to this column
    grows: bool = False  # gets the remaining width


def _rate(pick: Callable[[Rates], float], style: str) -> Cell:
    return lambda t, _w, _m: number(None if t.rates is None else pick(t.rates), style)


def _depth(name: str, style: str) -> Cell:
    return lambda t, _w, _m: number(getattr(t.stats, name) if t.stats else None, style)


def _age(name: str, style: str) -> Cell:
    def show(t: TopicWatch, _w: int, _m: int) -> Text:
        value = getattr(t.stats, name) if t.stats else None
        return Text(age(value), style=style if value is not None else QUIET)

    return show


def _disk(t: TopicWatch, _width: int, _largest: int) -> Text:
    log = t.stats.log if t.stats else None
    return Text(size(log.journal_bytes) if log else "", style=QUIET)


def _backlog(t: TopicWatch, width: int, largest: int) -> Text:
    """Draw ready and delayed messages relative to the largest backlog of all topics."""
    if t.stats is None or not largest:
        return Text()
    total = t.stats.ready + t.stats.delayed
    drawn = bar(total / largest, width)
    cut = round(len(drawn) * t.stats.ready / total) if total else 0
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
    Column("OLDEST", 6, _age("oldest_ready_age", ""), "oldest"),
    Column("DUE10S", 6, lambda t, _w, _m: number(t.due_within(10), DELAYED)),
    Column("DUE 1M", 6, lambda t, _w, _m: number(t.due_within(60), DELAYED), "due"),
    Column("LEASE", 6, _age("lease_ends_in", LEASED)),
    Column("COMMIT99", 8, lambda t, _w, _m: Text(millis(t.latency("commit").p99), style=QUIET)),
    Column("DISK", 9, _disk),
)
#: The most important first: a narrow terminal shows only these.
IMPORTANCE = (
    "READY", "IN/S", "OUT/S", "LEASED", "DEAD", "DELAY", "OLDEST", "IN", "DUE10S", "OUT", "DUE 1M", "LEASE", "FAIL/S",
    "COMMIT99", "BACKLOG", "DISK",
)  # fmt: skip


def choose(width: int, names: Sequence[str], *, with_curves: bool = True) -> tuple[int, list[tuple[Column, int]]]:
    """Return the width of the names, and the columns that fit with their widths; one blank separates two."""
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
