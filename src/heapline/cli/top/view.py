"""The frames of `heapline top`: the list of topics, and one topic in detail.

A frame is a list of lines that exactly fills the terminal. Without a terminal the same parts are plain lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from heapline.cli.output import count, counted, millis, size
from heapline.cli.top.columns import (
    DEAD,
    DELAYED,
    IN,
    LEASED,
    OUT,
    QUIET,
    READY,
    age,
    bar,
    chart,
    choose,
    number,
    short,
)
from heapline.cli.top.keyboard import Screen
from heapline.cli.top.sampler import TopicWatch, Watch
from heapline.contract.message import PartitionStats, TopicStats

LIST_KEYS = (("q", "quit"), ("s", "sort"), ("r", "reverse"), ("/", "filter"), ("↑↓ ⏎", "open"), ("p", "pause"))
DETAIL_KEYS = (("q", "quit"), ("esc", "all topics"), ("↑↓", "partitions"), ("p", "pause"))
ASCII = str.maketrans("▁▂▃▄▅▆▇█▏▎▍▌▋▊▉▲▼●✗…·↑↓⏎–∞❚×", "._-=+*%#|||||##^v*x..^v<-~|x")
BARS = 4  # lines of the depths by priority, and by due time
WITHIN: dict[float | None, str] = {
    0: "now", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 21600: "6 h", 86400: "1 day",
    604800: "7 days", 2592000: "30 days", None: "later",
}  # fmt: skip


# -- the list of topics ------------------------------------------------------------------------------------------------


def list_frame(watch: Watch, screen: Screen, width: int, height: int, clock: str, now: float) -> list[Text]:
    rows = watch.rows(screen.sort, screen.reverse, screen.only)
    totals = watch.totals()
    depths = depth_line(totals.ready, totals.delayed, totals.leased, totals.dead)
    lines = [
        title_line(counted(len(watch.topics), "topic"), screen, width, clock, now),
        depths + storage(totals.journal_bytes, totals.memory_bytes, width - depths.cell_len),
        *curves(list(watch.entered), list(watch.left), width, chart_lines(height)),
    ]
    left = height - len(lines) - 2  # without the head of the table and the line of keys
    chosen = next((i for i, row in enumerate(rows) if row.name == screen.chosen), None)
    first = 0 if chosen is None else min(max(0, len(rows) - left), max(0, chosen - left // 2))
    lines += table(watch, rows[first : first + max(0, left)], screen, width)
    if not rows and watch.topics:
        lines.append(Text(f" no topic name contains {screen.only!r}", style=QUIET))
    elif not rows:
        lines.append(Text(" no topics; create one with: heapline topic create jobs", style=QUIET))
    hidden = len(rows) - left
    return fit(lines, keys_line(LIST_KEYS, screen, f"{hidden} more" if hidden > 0 else ""), width, height)


def table(
    watch: Watch, rows: Sequence[TopicWatch], screen: Screen, width: int, *, with_curves: bool = True
) -> list[Text]:
    name_width, columns = choose(width, [row.name for row in rows], with_curves=with_curves)
    arrow = "▲" if screen.reverse != (screen.sort == "name") else "▼"
    head = Text(_cut(f"TOPIC{arrow}" if screen.sort == "name" else "TOPIC", name_width).ljust(name_width))
    for column, column_width in columns:
        is_sorted = column.sort == screen.sort
        title = f"{column.name}{arrow}"[-column_width:] if is_sorted else column.name
        title = title.ljust(column_width) if column.grows else title.rjust(column_width)
        head += Text(f" {title}", style="bold" if is_sorted else "")
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


def _name(row: TopicWatch, width: int) -> Text:
    is_paused = row.stats is not None and row.stats.paused
    mark = " ❚❚" if is_paused else ""
    name = _cut(row.name, width - len(mark)) + mark
    return Text(name.ljust(width), style="yellow" if is_paused else "bold")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


# -- one topic ---------------------------------------------------------------------------------------------------------


def detail_frame(watch: Watch, screen: Screen, width: int, height: int, clock: str, now: float) -> list[Text]:
    name = screen.topic or ""
    topic = watch.topics.get(name)
    lines = [title_line(name, screen, width, clock, now)]
    if topic is None or topic.stats is None:
        lines.append(Text(f" {topic.trouble if topic else f'topic {name!r} no longer exists'}", style="red"))
        return fit(lines, keys_line(DETAIL_KEYS, screen), width, height)
    stats = topic.stats
    lines += facts(topic, width)
    lines += curves(list(topic.entered), list(topic.left), width, chart_lines(height))
    if height >= 20:
        lines += waiting(stats, width, BARS if height < 30 else 2 * BARS)
    left = height - len(lines) - 2
    screen.scroll = min(screen.scroll, max(0, len(stats.partitions) - left))
    shown = stats.partitions[screen.scroll : screen.scroll + max(0, left)]
    lines += partitions(topic, shown, width)
    hidden = len(stats.partitions) - len(shown)
    return fit(lines, keys_line(DETAIL_KEYS, screen, f"{hidden} more" if hidden else ""), width, height)


def facts(topic: TopicWatch, width: int) -> list[Text]:
    """Return lines with depths, waits, latencies and failures."""
    stats, rates = topic.stats, topic.rates
    assert stats is not None
    depths = depth_line(stats.ready, stats.delayed, stats.leased, stats.dead)
    if topic.trouble:
        depths += Text(f" {topic.trouble}", style="bold red")
    elif stats.paused:
        depths += Text(" ❚❚ paused", style="bold yellow")
    if stats.log is not None:
        depths += storage(stats.log.journal_bytes, stats.log.memory_bytes, width - depths.cell_len)
    waits = _pairs(
        ("oldest ready", age(stats.oldest_ready_age), READY),
        ("first lease ends in", age(stats.lease_ends_in), LEASED),
        ("due in 10 s", short(topic.due_within(10)), DELAYED),
        ("in 1 min", short(topic.due_within(60)), DELAYED),
    )
    latencies = []
    for call in ("enqueue", "pop", "commit"):
        took = topic.latency(call)
        text = "–" if took.p50 is None else f"{millis(took.p50)} · p99 {millis(took.p99)}"
        latencies.append((call, text, "" if took.p50 is not None else QUIET))
    failures = [("nacked/s", rates.nacked), ("timed out/s", rates.timeouts), ("died/s", rates.dead)] if rates else []
    failing = [(name, short(value), "red") for name, value in failures if value]
    return [depths, waits, _pairs(*latencies), *([_pairs(*failing)] if failing else [])]


def _pairs(*pairs: tuple[str, str, str]) -> Text:
    line = Text()
    for name, value, style in pairs:
        line += Text(f" {name} ", style=QUIET) + Text(f"{value} ", style=style)
    return line


def waiting(stats: TopicStats, width: int, limit: int) -> list[Text]:
    """Return bars: left the ready messages by priority, most urgent first; right the delayed ones by due time."""
    half = (width - 3) // 2
    ready = [
        (f"{_bound(b.low)}…{_bound(b.high)}" if b.low != b.high else _bound(b.low), b.count)
        for b in stats.depth_by_priority
    ]
    due = [
        (f"in {WITHIN.get(b.within, b.within)}" if b.within else WITHIN[b.within], b.count)
        for b in stats.due_histogram
        if b.count
    ]
    left = bars("ready, by priority", ready, half, limit, "magenta")
    right = bars("delayed, due", due, half, limit, DELAYED)
    lines = []
    for index in range(max(len(left), len(right))):
        line = left[index] if index < len(left) else Text()
        line.truncate(half + 1)
        line.pad_right(half + 1 - line.cell_len)
        lines.append(line + Text(" ") + (right[index] if index < len(right) else Text()))
    return lines


def bars(title: str, values: Sequence[tuple[str, int]], width: int, limit: int, style: str) -> list[Text]:
    """Return one line per value. Values over the limit are summed up in the last line."""
    if len(values) > limit:
        values = [*values[: limit - 1], (f"{len(values) - limit + 1} more", sum(v for _, v in values[limit - 1 :]))]
    lines = [Text(f" {title}", style=QUIET)]
    highest = max((value for _, value in values), default=0)
    for name, value in values:
        line = Text(f" {name[:12]:>12} ", style="") + Text(f"{short(value):>5} ", style="bold")
        lines.append(line + Text(bar(value / highest if highest else 0, max(1, width - 22)), style=style))
    return lines if values else [*lines, Text("            –", style=QUIET)]


def _bound(priority: int) -> str:
    """
    >>> _bound(-500), _bound(20000), _bound(2**63 - 1)
    ('-500', '20.0k', '∞')
    """
    if abs(priority) >= 1 << 62:
        return "∞" if priority > 0 else "-∞"
    return f"-{short(-priority)}" if priority < 0 else short(priority)


def partitions(topic: TopicWatch, shown: Sequence[PartitionStats], width: int) -> list[Text]:
    head = Text(" PART  READY  DELAY LEASED   DEAD TAKEN/S OLDEST  LEASE  NOTE".ljust(width), style="reverse")
    lines = [head]
    for part in shown:
        line = Text(f" {part.partition:>4}")
        taken = topic.served.get(part.partition)
        depths = [(part.ready, READY, 7), (part.delayed, DELAYED, 7), (part.leased, LEASED, 7), (part.dead, DEAD, 7)]
        for value, style, wide in (*depths, (taken, OUT, 8)):
            text = number(value, style)
            line += Text(" " * (wide - text.cell_len)) + text
        line += Text(f"{age(part.oldest_ready_age):>7}{age(part.lease_ends_in):>7}")
        lines.append(line + Text("  ") + _note(part))
    return lines


def _note(part: PartitionStats) -> Text:
    if part.throttled is not None:
        return Text(f"throttled{f': {part.throttled}' if part.throttled else ''}", style="yellow")
    notes = [f"{count(part.blocked)} blocked by their key"] * (part.blocked > 0)
    return Text(", ".join(notes + [f"{count(part.prepared)} prepared"] * (part.prepared > 0)), style=QUIET)


# -- parts of both frames ----------------------------------------------------------------------------------------------


def title_line(title: str, screen: Screen, width: int, clock: str, now: float) -> Text:
    left = Text(" heapline top ", style="bold reverse cyan") + Text(f" {screen.server} ", style="bold")
    left += Text(f"· {title}")
    if screen.lost:
        state = Text(f"✗ {screen.lost} {age(max(0.0, now - screen.lost_at))} ago, retrying ", style="bold red")
    elif screen.is_held:
        state = Text("❚❚ paused ", style="bold yellow")
    else:
        state = Text("● ", style="green") + Text(f"every {screen.interval:g} s  {clock} ", style=QUIET)
    left.truncate(max(0, width - state.cell_len - 1), overflow="ellipsis")
    return left + Text(" " * max(1, width - left.cell_len - state.cell_len)) + state


def depth_line(ready: int, delayed: int, leased: int, dead: int) -> Text:
    line = Text()
    depths = (("ready", ready, READY), ("delayed", delayed, DELAYED), ("leased", leased, LEASED), ("dead", dead, DEAD))
    for name, value, style in depths:
        line += Text(f" {name} ", style=QUIET) + Text(f"{count(value)}  ", style=style if value else QUIET)
    return line


def storage(journal_bytes: int | None, memory_bytes: int | None, width: int) -> Text:
    if journal_bytes is None or memory_bytes is None:
        return Text()
    disk, memory = f" disk {size(journal_bytes)}", f"  memory {size(memory_bytes)}"
    fitting = disk + memory if len(disk + memory) <= width else disk if len(disk) <= width else ""
    return Text(fitting, style=QUIET)


def curves(entered: list[float | None], left: list[float | None], width: int, height: int) -> list[Text]:
    """Return the rates in and out side by side, as numbers and, if `height` is not 0, as curves."""
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
        cursor = Text(screen.only) + Text("█", style="blink")
        return Text(" filter: ", style="bold cyan") + cursor + Text("   ⏎ keep   esc all topics", style=QUIET)
    line = Text()
    for key, action in keys:
        line += Text(f" {key} ", style="bold cyan") + Text(action + " ", style=QUIET)
    if screen.only:
        line += Text(f"  only {screen.only!r}", style="yellow")
    return line + Text(f"  … {more}" if more else "", style="yellow")


def chart_lines(height: int) -> int:
    """Return how many lines the curves get on a terminal of this height."""
    return 5 if height >= 32 else 3 if height >= 22 else 2 if height >= 17 else 0


def fit(lines: list[Text], last: Text, width: int, height: int) -> list[Text]:
    """Return exactly as many lines as the terminal has, each within its width, with `last` at the bottom."""
    lines = lines[: max(0, height - 1)]
    lines += [Text()] * (height - 1 - len(lines))
    for line in (*lines, last):
        line.truncate(width)
        line.no_wrap = True
    return [*lines, last]


def translated(lines: list[Text], console: Console) -> list[Text]:
    """Replace each special character with one of ASCII, if the console supports only those."""
    if console.options.ascii_only:
        for line in lines:
            line.plain = line.plain.translate(ASCII)
    return lines


def plain_lines(watch: Watch, screen: Screen, width: int) -> list[Text]:
    """Return all topics, or one topic, as lines for a file or a pipe."""
    if screen.topic is None:
        totals = watch.totals()
        first = depth_line(totals.ready, totals.delayed, totals.leased, totals.dead)
        first += Text(f" in {short(totals.enqueued)}/s  out {short(totals.acked)}/s")
        rows = watch.rows(screen.sort, screen.reverse, screen.only)
        lines = [first, *table(watch, rows, screen, width, with_curves=False)]
    else:
        lines = _plain_topic(watch.topics[screen.topic], width)
    for line in lines:
        line.rstrip()
    return lines


def _plain_topic(topic: TopicWatch, width: int) -> list[Text]:
    if topic.stats is None:
        return [Text(f"{topic.name}: {topic.trouble}")]
    lines = facts(topic, width)
    if topic.rates:
        lines.append(Text(f" in {short(topic.rates.enqueued)}/s  out {short(topic.rates.acked)}/s"))
    lines += waiting(topic.stats, min(width, 100), 12)
    return lines + partitions(topic, topic.stats.partitions, width)
