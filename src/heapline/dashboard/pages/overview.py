"""The overview: what is wrong, how much there is, and which topics need attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from heapline.cli.top.sampler import percentile_ms
from heapline.contract.call import Right
from heapline.contract.message import TopicStats
from heapline.dashboard.caller import Caller
from heapline.dashboard.charts import SPANS, Chart, rates_of, read_series
from heapline.dashboard.features import features_of
from heapline.dashboard.page import Place, page, path_to
from heapline.dashboard.render import audited, counted, duration, size
from heapline.dashboard.topic_rows import ROWS_MAX, Rate, TopicRows, rates_now, read_stats, sparks_of

LATE = 600.0  # seconds that the oldest message waits before it is an alarm
ALARMS_MAX = 6
DISK_MIN = 1 << 30  # free bytes below which the disk is an alarm
LAG_MAX = 1.0  # seconds from which a delay of the server itself is bad
LAGS = {"late": "Timer lag", "commit": "Commit"}  # the topic with the longest is shown


class Fact(NamedTuple):
    """One figure of the server's health."""

    label: str
    value: str
    detail: str
    is_bad: bool = False


class Alarm(NamedTuple):
    rank: int  # the worst has the smallest
    level: str  # "dead" or "warn"
    topic: str
    text: str
    remedy: str
    path: str


@page("/", "overview", "overview.html")
async def overview(caller: Caller, place: Place) -> dict[str, Any]:
    stats, is_cut = await read_stats(caller)
    alarms = sorted([*(alarm for topic in stats for alarm in alarms_of(topic)), *disk_alarms(stats)])
    sums = {name: sum(getattr(topic, name) for topic in stats) for name in ("ready", "delayed", "leased", "dead")}
    rates = rates_now(caller, stats)
    chart = None
    features = await features_of(caller)
    if caller.may(Right.CONSUME, None) and "series" in features:
        chart = rates_of(await read_series(caller, None, place))
    rows = TopicRows(stats, place.choice("sort", "oldest", "ready", "delayed", "leased", "dead", "topic"))
    return {
        "title": "Overview",
        "alarms": alarms[:ALARMS_MAX],
        "alarms_left": max(0, len(alarms) - ALARMS_MAX),
        "sums": sums,
        "health": health_of(stats),
        "rates": rates,
        "done": _done(rates, chart),
        "chart": chart,
        "spans": SPANS,
        "span": place.choice("span", *SPANS),
        "rows": rows,
        "topics": rows.rows[:ROWS_MAX],
        "sparks": await sparks_of(caller, rows.rows[:ROWS_MAX]) if "series" in features else None,
        "topic_count": len(stats),
        "is_cut": is_cut,
    }


def _done(rates: Mapping[str, Rate], chart: Chart | None) -> float | None:
    """Return how much is done per second: by the last seconds, or the last point if these were not watched."""
    known = [rate.done for rate in rates.values() if rate.done is not None]
    if known:
        return sum(known)
    return chart.lines[1][-1] if chart is not None and chart.times else None


def _free(stats: Sequence[TopicStats]) -> int | None:
    """Return the free bytes of the disk. None: there is no journal, or it is in memory."""
    return next((topic.log.disk_free_bytes for topic in stats if topic.log is not None), None)


def _is_low(free: int, journal: int) -> bool:
    """Return whether the disk may soon be full. Snapshots and rewriting need space, too."""
    return free < max(DISK_MIN, journal // 10)


def _journal(stats: Sequence[TopicStats]) -> int:
    return sum(topic.log.journal_bytes for topic in stats if topic.log is not None)


def health_of(stats: Sequence[TopicStats]) -> list[Fact]:
    """Return disk, journal and lag: how late timers are, and how long a commit takes until it is durable."""
    found = []
    if (free := _free(stats)) is not None:
        found.append(Fact("Disk free", size(free), "", _is_low(free, _journal(stats))))
    if any(topic.log is not None for topic in stats):
        segments = sum(topic.log.journal_segments for topic in stats if topic.log is not None)
        found.append(Fact("Journal", size(_journal(stats)), f"in {counted(segments, 'segment')}"))
    for kind, label in LAGS.items():
        worst = max(((late, topic.topic) for topic in stats if (late := p95(topic, kind)) is not None), default=None)
        if worst is not None:
            found.append(Fact(label, duration(worst[0]), f"p95 in {worst[1]}", worst[0] >= LAG_MAX))
    return found


def p95(stats: TopicStats, kind: str) -> float | None:
    """Return the seconds that 95 % of these durations do not exceed, since the topic was opened."""
    found = stats.latencies.get(kind)
    most = None if found is None else percentile_ms(found.bounds_ms, found.counts, 95)
    return None if most is None else most / 1000


def disk_alarms(stats: Sequence[TopicStats]) -> list[Alarm]:
    free = _free(stats)
    if free is None or not _is_low(free, _journal(stats)):
        return []
    largest = max(stats, key=lambda topic: 0 if topic.log is None else topic.log.journal_bytes)
    path = path_to(f"/topics/{largest.topic}", tab="partitions")
    text = f"has the largest journal, and the disk has only {size(free)} left"
    return [Alarm(0, "dead", largest.topic, text, "free space, or lower the retention", path)]


def alarms_of(stats: TopicStats) -> list[Alarm]:
    """Return what is wrong with a topic, each with its remedy and the page for it."""
    name, found = stats.topic, []
    page_of = path_to(f"/topics/{name}")
    if stats.log is not None and stats.log.corrupt_records_total:
        text = f"{counted(stats.log.corrupt_records_total, 'record')} could not be read"
        found.append(Alarm(0, "dead", name, text, "run heapline journal verify", page_of))
    if stats.log is not None and stats.log.audit is not None and stats.log.audit.refuted:
        text = f"its last audit found {audited(stats.log.audit)}"
        found.append(Alarm(0, "dead", name, text, "run heapline pipeline audit for examples", path_to("/pipeline")))
    waits = stats.oldest_ready_age or 0.0
    if stats.paused and stats.ready:
        found.append(
            Alarm(
                2,
                "warn",
                name,
                f"paused while {counted(stats.ready, 'message')} wait{'s' if stats.ready == 1 else ''}",
                "resume it",
                page_of,
            )
        )
    elif waits > LATE:
        text = f"the oldest message waits {duration(waits)}"
        remedy = "add workers" if stats.leased else "no message is leased: start a worker"
        found.append(Alarm(1, "warn", name, text, remedy, page_of))
    if stats.dead:
        text = counted(stats.dead, "dead letter")
        found.append(Alarm(3, "dead", name, text, "replay or delete", path_to("/dead", topic=name)))
    throttled = [str(partition.partition) for partition in stats.partitions if partition.throttled is not None]
    if throttled:
        text = f"partition{'s' if len(throttled) > 1 else ''} {', '.join(throttled[:5])} throttled"
        found.append(Alarm(4, "warn", name, text, "release", path_to(f"/topics/{name}", tab="partitions")))
    return found
