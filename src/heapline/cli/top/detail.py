"""One topic in full: its rates, how long things take, what waits by priority and by time, and its partitions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from heapline.cli.present import count
from heapline.cli.top.columns import DEAD, DELAYED, LEASED, OUT, QUIET, READY, number
from heapline.cli.top.figures import age, bar, millis, short
from heapline.cli.top.model import TopicWatch, Watch
from heapline.cli.top.screen import Screen
from heapline.cli.top.view import DETAIL_KEYS, chart_lines, curves, depth_line, fit, kept, keys_line, title_line
from heapline.model import PartitionStats, TopicStats

BARS = 4  # lines of what waits by priority, and by time
WITHIN: dict[float | None, str] = {
    0: "now", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 21600: "6 h", 86400: "1 day",
    604800: "7 days", 2592000: "30 days", None: "later",
}  # fmt: skip


def detail_frame(watch: Watch, screen: Screen, width: int, height: int, clock: str, now: float) -> list[Text]:
    name = screen.topic or ""
    topic = watch.topics.get(name)
    lines = [title_line(name, screen, width, clock, now)]
    if topic is None or topic.stats is None:
        lines.append(Text(f" {topic.trouble if topic else f'there is no topic {name!r} any more'}", style="red"))
        return fit(lines, keys_line(DETAIL_KEYS, screen), width, height)
    stats = topic.stats
    lines += facts(topic, width)
    lines += curves(list(topic.entered), list(topic.left), width, chart_lines(height))
    if height >= 20:
        lines += waiting(stats, width, BARS if height < 30 else 2 * BARS)
    room = height - len(lines) - 2
    screen.scroll = min(screen.scroll, max(0, len(stats.partitions) - room))
    shown = stats.partitions[screen.scroll : screen.scroll + max(0, room)]
    lines += partitions(topic, shown, width)
    hidden = len(stats.partitions) - len(shown)
    return fit(lines, keys_line(DETAIL_KEYS, screen, f"{hidden} more" if hidden else ""), width, height)


def facts(topic: TopicWatch, width: int) -> list[Text]:
    """Depths, waits, and how long calls take."""
    stats, rates = topic.stats, topic.rates
    assert stats is not None
    depth = depth_line(stats.ready, stats.delayed, stats.leased, stats.dead)
    if topic.trouble:
        depth += Text(f" {topic.trouble}", style="bold red")
    elif stats.paused:
        depth += Text(" ❚❚ paused", style="bold yellow")
    waits = _pairs(
        ("oldest ready", age(stats.oldest_ready_age), READY), ("first lease ends in", age(stats.lease_ends_in), LEASED),
        ("due in 10 s", short(topic.due_within(10)), DELAYED), ("in 1 min", short(topic.due_within(60)), DELAYED),
    )  # fmt: skip
    failing = [("nacked/s", rates.nacked), ("timed out/s", rates.timeouts), ("died/s", rates.dead)] if rates else []
    troubles = [(name, short(value), "red") for name, value in failing if value]
    long = []
    for what in ("enqueue", "pop", "commit"):
        took = topic.latency(what)
        told = "–" if took.p50 is None else f"{millis(took.p50)} · p99 {millis(took.p99)}"
        long.append((what, told, "" if took.p50 is not None else QUIET))
    depth += kept(stats.journal_bytes, stats.memory_bytes, width - depth.cell_len)
    lines = [depth, waits, _pairs(*long)]
    return [*lines, _pairs(*troubles)] if troubles else lines


def _pairs(*pairs: tuple[str, str, str]) -> Text:
    line = Text()
    for name, value, style in pairs:
        line += Text(f" {name} ", style=QUIET) + Text(f"{value} ", style=style)
    return line


def waiting(stats: TopicStats, width: int, room: int) -> list[Text]:
    """Left what is ready by priority, the most urgent ranges; right what is delayed, by when it falls due."""
    half = (width - 3) // 2
    ready = [(f"{_bound(b.low)}…{_bound(b.high)}" if b.low != b.high else _bound(b.low), b.count)
             for b in stats.depth_by_priority]  # fmt: skip
    due = [(f"in {WITHIN.get(b.within, b.within)}" if b.within else WITHIN[b.within], b.count)
           for b in stats.due_histogram if b.count]  # fmt: skip
    left = bars("ready, by priority", ready, half, room, "magenta")
    right = bars("delayed, due", due, half, room, DELAYED)
    lines = []
    for index in range(max(len(left), len(right))):
        line = left[index] if index < len(left) else Text()
        line.truncate(half + 1)
        line.pad_right(half + 1 - line.cell_len)
        lines.append(line + Text(" ") + (right[index] if index < len(right) else Text()))
    return lines


def bars(title: str, values: Sequence[tuple[str, int]], width: int, room: int, style: str) -> list[Text]:
    """One line a value; those for which there is no room are counted together in the last line."""
    if len(values) > room:
        values = [*values[: room - 1], (f"{len(values) - room + 1} more", sum(v for _, v in values[room - 1 :]))]
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
        for value, style, wide in (
            (part.ready, READY, 7), (part.delayed, DELAYED, 7), (part.leased, LEASED, 7), (part.dead, DEAD, 7),
            (topic.served.get(part.partition), OUT, 8),
        ):  # fmt: skip
            text = number(value, style)
            line += Text(" " * (wide - text.cell_len)) + text
        line += Text(f"{age(part.oldest_ready_age):>7}{age(part.lease_ends_in):>7}")
        lines.append(line + Text("  ") + _note(part))
    return lines


def _note(part: PartitionStats) -> Text:
    if part.throttled is not None:
        return Text(f"throttled{f': {part.throttled}' if part.throttled else ''}", style="yellow")
    notes = [f"{count(part.blocked)} wait for their key's turn"] * (part.blocked > 0)
    return Text(", ".join(notes + [f"{count(part.prepared)} prepared"] * (part.prepared > 0)), style=QUIET)
