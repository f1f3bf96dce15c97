"""One look as plain lines, as many as there are topics or partitions: for scripts, files and pipes."""

from __future__ import annotations

from rich.text import Text

from heapline.cli.top.detail import facts, partitions, waiting
from heapline.cli.top.figures import short
from heapline.cli.top.model import Watch
from heapline.cli.top.screen import Screen
from heapline.cli.top.view import depth_line, table


def lines_of(watch: Watch, screen: Screen, width: int) -> list[Text]:
    lines = _one_topic(watch, screen, width) if screen.topic is not None else _all_topics(watch, screen, width)
    for line in lines:
        line.rstrip()
    return lines


def _all_topics(watch: Watch, screen: Screen, width: int) -> list[Text]:
    totals = watch.totals()
    first = depth_line(totals.ready, totals.delayed, totals.leased, totals.dead)
    first += Text(f" in {short(totals.enqueued)}/s  out {short(totals.acked)}/s")
    return [
        first,
        *table(watch, watch.rows(screen.sort, screen.reverse, screen.only), screen, width, with_curves=False),
    ]


def _one_topic(watch: Watch, screen: Screen, width: int) -> list[Text]:
    topic = watch.topics[screen.topic or ""]
    if topic.stats is None:
        return [Text(f"{topic.name}: {topic.trouble}")]
    entering = topic.rates and Text(f" in {short(topic.rates.enqueued)}/s  out {short(topic.rates.acked)}/s")
    return [
        *facts(topic, width), *([entering] if entering else []), *waiting(topic.stats, min(width, 100), 12),
        *partitions(topic, topic.stats.partitions, width),
    ]  # fmt: skip
