"""How `heapline top` looks: lines of text, exactly as many and as wide as the terminal has room for.

The list of topics is here, with what stands above and below it in either view; one topic is detail.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from heapline.cli.present import count, size
from heapline.cli.top.columns import DEAD, DELAYED, IN, LEASED, OUT, QUIET, READY, choose
from heapline.cli.top.figures import age, chart, short
from heapline.cli.top.model import TopicWatch, Watch
from heapline.cli.top.screen import Screen

LIST_KEYS = (("q", "quit"), ("s", "sort"), ("r", "reverse"), ("/", "filter"), ("↑↓ ⏎", "look into"), ("p", "hold"))
PLAIN = str.maketrans("▁▂▃▄▅▆▇█▏▎▍▌▋▊▉▲▼●✗…·↑↓⏎–∞❚×", "._-=+*%#|||||##^v*x..^v<-~|x")
DETAIL_KEYS = (("q", "quit"), ("esc", "all topics"), ("↑↓", "partitions"), ("p", "hold"))


def list_frame(watch: Watch, screen: Screen, width: int, height: int, clock: str, now: float) -> list[Text]:
    rows = watch.rows(screen.sort, screen.reverse, screen.only)
    lines = [title_line(f"{count(len(watch.topics))} topic{'s' * (len(watch.topics) != 1)}", screen, width, clock, now)]
    totals = watch.totals()
    depth = depth_line(totals.ready, totals.delayed, totals.leased, totals.dead)
    lines.append(depth + kept(totals.journal_bytes, totals.memory_bytes, width - depth.cell_len))
    lines += curves(list(watch.entered), list(watch.left), width, chart_lines(height))
    room = height - len(lines) - 2  # below: the keys, above the topics: their head
    chosen = next((i for i, row in enumerate(rows) if row.name == screen.chosen), None)
    first = 0 if chosen is None else min(max(0, len(rows) - room), max(0, chosen - room // 2))
    lines += table(watch, rows[first : first + max(0, room)], screen, width)
    if not rows:
        lines.append(_empty(watch, screen))
    hidden = len(rows) - room
    return fit(lines, keys_line(LIST_KEYS, screen, f"{hidden} more" if hidden > 0 else ""), width, height)


def table(
    watch: Watch, rows: Sequence[TopicWatch], screen: Screen, width: int, *, with_curves: bool = True
) -> list[Text]:
    name_width, columns = choose(width, [row.name for row in rows], with_curves=with_curves)
    arrow = "▲" if screen.reverse != (screen.sort == "name") else "▼"
    head = Text(_cut(f"TOPIC{arrow}" if screen.sort == "name" else "TOPIC", name_width).ljust(name_width))
    for column, column_width in columns:
        sorted_by = column.sort == screen.sort
        words = f"{column.name}{arrow}"[-column_width:] if sorted_by else column.name
        head += Text(" " + (words.ljust(column_width) if column.grows else words.rjust(column_width)),
                     style="bold" if sorted_by else "")  # fmt: skip
    head.stylize("reverse")
    head.pad_right(max(0, width - head.cell_len))
    head.stylize("reverse", 0, width)
    largest = max((t.stats.ready + t.stats.delayed for t in watch.topics.values() if t.stats), default=0)
    lines = [head]
    for row in rows:
        line = _name(row, name_width)
        if row.trouble:
            line += Text(" " + row.trouble, style="red")
        else:
            for column, column_width in columns:
                shown = column.show(row, column_width, largest)
                gap = " " * max(0, column_width - shown.cell_len)
                line += Text(" ") + (shown + Text(gap) if column.name == "BACKLOG" else Text(gap) + shown)
        if row.name == screen.chosen:
            line.pad_right(max(0, width - line.cell_len))
            line.stylize("on grey23")
        lines.append(line)
    return lines


def title_line(what: str, screen: Screen, width: int, clock: str, now: float) -> Text:
    left = (
        Text(" heapline top ", style="bold reverse cyan") + Text(f" {screen.server} ", style="bold") + Text(f"· {what}")
    )
    if screen.lost:
        state = Text(f"✗ {screen.lost} {age(max(0.0, now - screen.lost_at))} ago, trying again ", style="bold red")
    elif screen.is_held:
        state = Text("❚❚ held ", style="bold yellow")
    else:
        state = Text("● ", style="green") + Text(f"every {screen.interval:g} s  {clock} ", style=QUIET)
    left.truncate(max(0, width - state.cell_len - 1), overflow="ellipsis")
    return left + Text(" " * max(1, width - left.cell_len - state.cell_len)) + state


def depth_line(ready: int, delayed: int, leased: int, dead: int) -> Text:
    line = Text()
    named = (("ready", ready, READY), ("delayed", delayed, DELAYED), ("leased", leased, LEASED), ("dead", dead, DEAD))
    for name, number, style in named:
        line += Text(f" {name} ", style=QUIET) + Text(f"{count(number)}  ", style=style if number else QUIET)
    return line


def kept(journal_bytes: int, memory_bytes: int, room: int) -> Text:
    disk, memory = f" disk {size(journal_bytes)}", f"  memory {size(memory_bytes)}"
    fitting = disk + memory if len(disk + memory) <= room else disk if len(disk) <= room else ""
    return Text(fitting, style=QUIET)


def curves(entered: list[float | None], left: list[float | None], width: int, height: int) -> list[Text]:
    """What goes in and what comes out, side by side; without room, as two numbers."""
    half = (width - 3) // 2
    lines = [_curve_head("in", entered[-half:], IN, half + 2) + _curve_head("out", left[-half:], OUT, half)]
    if height:
        drawn = zip(chart(entered, half, height), chart(left, half, height), strict=True)
        lines += [Text(" ") + Text(a, style=IN) + Text("  ") + Text(b, style=OUT) for a, b in drawn]
    return lines


def _curve_head(name: str, values: list[float | None], style: str, width: int) -> Text:
    highest = max((value for value in values if value), default=None)
    head = Text(f" {name} ", style=style) + Text(f"{short(values[-1] if values else None)}/s", style=f"bold {style}")
    head += Text(f"  peak {short(highest)}" if highest else "", style=QUIET)
    head.pad_right(max(0, width - head.cell_len))
    return head


def keys_line(keys: Iterable[tuple[str, str]], screen: Screen, more: str = "") -> Text:
    if screen.is_typing:
        return (Text(" filter: ", style="bold cyan") + Text(screen.only) + Text("█", style="blink")
                + Text("   ⏎ keep   esc all topics", style=QUIET))  # fmt: skip
    line = Text()
    for key, does in keys:
        line += Text(f" {key} ", style="bold cyan") + Text(does + " ", style=QUIET)
    if screen.only:
        line += Text(f"  only {screen.only!r}", style="yellow")
    return line + Text(f"  … {more}" if more else "", style="yellow")


def drawable(lines: list[Text], console: Console) -> list[Text]:
    """The same, sign for sign, for a terminal or a file that knows no more than ASCII."""
    if console.options.ascii_only:
        for line in lines:
            line.plain = line.plain.translate(PLAIN)
    return lines


def chart_lines(height: int) -> int:
    """How much of a terminal's height the curves get."""
    return 5 if height >= 32 else 3 if height >= 22 else 2 if height >= 17 else 0


def fit(lines: list[Text], last: Text, width: int, height: int) -> list[Text]:
    """As many lines as the terminal has, each within its width, the last one at its bottom."""
    lines = lines[: max(0, height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    for line in (*lines, last):
        line.truncate(width)
        line.no_wrap = True
    return [*lines, last]


def _name(row: TopicWatch, width: int) -> Text:
    is_paused = row.stats is not None and row.stats.paused
    mark = " ❚❚" if is_paused else ""
    name = _cut(row.name, width - len(mark)) + mark
    return Text(name.ljust(width), style="yellow" if is_paused else "bold")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _empty(watch: Watch, screen: Screen) -> Text:
    if watch.topics:
        return Text(f" no topic has {screen.only!r} in its name", style=QUIET)
    return Text(" no topics yet: heapline topic create jobs", style=QUIET)
