"""Reports and forecasts as sections: the same tables for the terminal and for the HTML page, which adds plots."""

from __future__ import annotations

from collections.abc import Sequence

from heapline.spark.jobs import plots
from heapline.spark.jobs.forecast import WORKERS_MAX, Forecast, Wait, WorkerPool
from heapline.spark.jobs.pages import Section, amount, count, duration, moment, page, share
from heapline.spark.jobs.report import Counted, Percentiles, Report

RANKS = ("p50", "p90", "p99", "max")
LINES_MAX = 6  # priorities in the plot of a forecast
_WAIT = "From the due time of a message to its first lease. Smaller priorities go first."
_SERVICE = (
    "From the last lease to the end. If a worker leases many messages at once and acks them one by one, the later ones "
    "look slow."
)


# -- the report --------------------------------------------------------------------------------------------------------


def report_page(report: Report) -> str:
    return page(f"Topic {report.topic}", report_lead(report), report_sections(report))


def report_lead(report: Report) -> str:
    if report.first_ms is None or report.last_ms is None:
        return "No messages were enqueued in this period."
    return (
        f"{count(report.messages)} messages enqueued since {moment(report.first_ms)}, followed until "
        f"{moment(report.last_ms)}: {count(report.deliveries)} deliveries, {count(report.retries)} retries, "
        f"{count(report.lease_expiries)} expired leases."
    )


def report_sections(report: Report) -> list[Section]:
    """Return the sections that have rows."""
    found = [
        _counted("Outcomes", "The outcome of each message.", "outcome", report.outcomes, report.messages),
        _by_priority(report, "Waits by priority", _WAIT, "wait"),
        _by_priority(report, "Service times by priority", _SERVICE, "service"),
        _throughput(report),
        _counted(
            "Retries",
            "Messages by number of retries (10 means ten or more).",
            "retries",
            report.retried,
            report.messages,
        ),
        _counted(
            "Dead letters",
            "The reasons of dead letters.",
            "reason",
            tuple(Counted(c.what or "(no reason)", c.messages) for c in report.dead_reasons),
            sum(c.messages for c in report.outcomes if c.what == "dead"),
        ),
        _delays(report),
        _counted(
            "Busiest keys",
            f"Of {count(report.with_key)} messages with a key. All messages of a key go to one partition.",
            "key",
            report.keys,
            report.with_key,
        ),
    ]
    return [section for section in found if section.rows]


def _counted(title: str, note: str, name: str, items: tuple[Counted, ...], whole: int) -> Section:
    rows = tuple((item.what, count(item.messages), share(item.messages, whole)) for item in items)
    summary = "; ".join(f"{item.what}: {count(item.messages)}" for item in items[:10])
    bars = [(item.what, float(item.messages), count(item.messages)) for item in items]
    plot = plots.bars(title.lower().replace(" ", "-"), title, summary, bars) if items else ""
    return Section(title, note, (name, "messages", "share"), rows, right=(1, 2), plot=plot)


def _by_priority(report: Report, title: str, note: str, field: str) -> Section:
    names: tuple[str, ...] = ("priority", "messages", *RANKS)
    rows: list[_Row] = []
    for row in report.priorities:
        of: Percentiles = getattr(row, field)
        priority = "all" if row.priority is None else str(row.priority)
        label = priority if row.priority is None else f"priority {priority}"
        if field == "wait":
            rows.append((priority, label, of, (count(row.never_leased),)))
        elif of.count:
            rows.append((priority, label, of, ()))
    return _percentiles(field, title, note, (*names, "never leased") if field == "wait" else names, rows)


_Row = tuple[str, str, Percentiles, tuple[str, ...]]  # first cell, label in the plot, durations, last cells


def _percentiles(name: str, title: str, note: str, names: tuple[str, ...], rows: Sequence[_Row]) -> Section:
    """Return a section of percentiles. It has no rows if there are no durations."""
    cells = tuple((first, count(of.count), *map(duration, _values(of)), *last) for first, _, of, last in rows)
    drawn = [(label, _values(of)) for _, label, of, _ in rows if of.count]
    summary = "; ".join(f"{label}: median {duration(v[0])}, p99 {duration(v[2])}" for label, v in drawn[:8])
    plot = plots.ranges(name, title, summary, RANKS, drawn) if drawn else ""
    return Section(title, note, names, cells if drawn else (), tuple(range(1, len(names))), plot)


def _values(of: Percentiles) -> tuple[float, ...]:
    return of.p50, of.p90, of.p99, of.max  # type: ignore[return-value]  # either all are None, or none is


def _throughput(report: Report) -> Section:
    title, names = "Throughput", ("from", "enqueued", "done", "enqueued per second", "done per second")
    width, buckets = report.bucket_seconds, report.throughput
    note = f"Messages enqueued and messages ended, in steps of {duration(width * 1000)}."
    if not buckets:
        return Section(title, note, names, ())
    rows = tuple(
        (moment(b.at_ms), count(b.enqueued), count(b.done), f"{b.enqueued / width:.3g}", f"{b.done / width:.3g}")
        for b in buckets
    )
    series = [
        plots.Series("enqueued", [(b.at_ms, b.enqueued / width) for b in buckets]),
        plots.Series("done", [(b.at_ms, b.done / width) for b in buckets]),
    ]
    highest = max(value for item in series for _, value in item.points)
    summary = (
        f"At most {highest:.3g} messages per second, from {moment(buckets[0].at_ms)} to {moment(buckets[-1].at_ms)}."
    )
    plot = plots.lines(
        "throughput",
        title,
        summary,
        series,
        plots.time_axis(buckets[0].at_ms, buckets[-1].at_ms),
        plots.number_axis(highest),
        x_name="time (UTC)",
        y_name="messages per second",
    )
    return Section(title, note, names, rows, right=(1, 2, 3, 4), plot=plot)


def _delays(report: Report) -> Section:
    note = (
        "For messages with a delivery time: how long after it they became ready, and how long after it they were "
        "leased. If only the second is shown, the log does not record when messages became ready."
    )
    delays = report.delays
    found = () if delays is None else (("until ready", delays.to_ready), ("until leased", delays.to_leased))
    rows: list[_Row] = [(label, label, of, ()) for label, of in found if of.count]
    return _percentiles("delay", "Scheduler delay", note, ("from the due time", "messages", *RANKS), rows)


# -- the forecast ------------------------------------------------------------------------------------------------------


def forecast_page(forecast: Forecast) -> str:
    return page(f"Topic {forecast.topic}: how many workers?", forecast_lead(forecast), forecast_sections(forecast))


def forecast_lead(forecast: Forecast) -> str:
    grown = "" if forecast.growth == 1.0 else f", multiplied by {amount(forecast.growth)}"
    part = "" if forecast.sampled == 1.0 else f" Based on a sample of {share(forecast.sampled, 1.0)} of the past."
    return (
        f"{count(forecast.messages)} messages in {duration(forecast.seconds * 1000)}{grown}: "
        f"{amount(forecast.arrivals_per_second)} per second, each of which takes a worker "
        f"{duration(forecast.service_mean_ms)}.{part} {_answer(forecast)}"
    )


def _answer(forecast: Forecast) -> str:
    floor = f"With fewer than {forecast.floor} workers the queue would only grow. " if forecast.floor > 1 else ""
    if not forecast.goals_ms:
        return floor.strip()
    goals = ", ".join(
        f"{duration(ms)}{f' for priority {name}' if name else ''}" for name, ms in forecast.goals_ms.items()
    )
    if forecast.workers_needed is None:
        return f"{floor}Even {count(WORKERS_MAX)} workers do not keep the p95 of waits within {goals}."
    workers = f"{count(forecast.workers_needed)} worker{'s keep' if forecast.workers_needed > 1 else ' keeps'}"
    return f"{floor}{workers} the p95 of waits within {goals}."


def forecast_sections(forecast: Forecast) -> list[Section]:
    names = ("workers", "busy", "goal", "mean", "p50", "p95", "p99", "max")
    rows = tuple(
        (count(c.workers), share(c.busy, 1.0), _goal_text(c), *_wait_cells(c.waits[0])) for c in forecast.pools
    )
    if forecast.observed:
        rows = (*rows, ("observed", "–", "–", *_wait_cells(forecast.observed[0])))
    note = (
        "Waits from being ready to being leased, if the past repeated itself. The goal is met if every priority meets "
        "it. Fetching and acking are assumed to cost nothing, so real waits are slightly longer."
    )
    found = [Section("Workers and waits", note, names, rows, tuple(range(8)), _wait_plot(forecast))]
    by_priority = _pools_by_priority(forecast)
    return [*found, by_priority] if by_priority.rows else found


def _goal_text(pool: WorkerPool) -> str:
    return "–" if pool.meets_goal is None else "met" if pool.meets_goal else "missed"


def _wait_cells(wait: Wait) -> tuple[str, ...]:
    return tuple(duration(value) for value in (wait.mean, wait.p50, wait.p95, wait.p99, wait.max))


def _pools_by_priority(forecast: Forecast) -> Section:
    names = ("workers", "priority", "messages", "mean", "p50", "p95", "p99", "max")
    pools = [(count(c.workers), c.waits) for c in forecast.pools] + [("observed", forecast.observed)]
    rows = tuple(
        (workers, str(wait.priority), count(wait.messages), *_wait_cells(wait))
        for workers, waits in pools
        for wait in waits
        if wait.priority is not None and len(waits) > 2  # a single priority is the same as all
    )
    note = "Waits by priority. Smaller priorities go first; work that has started is not interrupted."
    return Section("Waits by priority", note, names, rows, tuple(range(1, 8)))


def _wait_plot(forecast: Forecast) -> str:
    pools = forecast.pools
    kinds = [wait.priority for wait in pools[0].waits[: LINES_MAX + 1]]
    if len(kinds) == 2:
        kinds = kinds[:1]  # a single priority is the same as all
    series = [
        plots.Series(
            "all" if kind is None else f"priority {kind}",
            [(c.workers, wait.p95) for c in pools for wait in c.waits if wait.priority == kind],
        )
        for kind in kinds
    ]
    most = max(pool.workers for pool in pools)
    goals = list(forecast.goals_ms.values())
    goal = goals[0] if len(goals) == 1 else None
    ticks = sorted({c.workers for c in pools}) if len(pools) <= 10 else plots.number_axis(most).ticks
    x = plots.Axis(min(c.workers for c in pools), most, _apart(ticks, most), amount, is_log=True)
    y = plots.duration_axis(max(goal or 0, *(value for line in series for _, value in line.points)))
    summary = "; ".join(f"{c.workers} workers: {duration(c.waits[0].p95)}" for c in pools[:12])
    return plots.lines(
        "workers",
        "p95 of waits by number of workers",
        summary,
        series,
        x,
        y,
        goal,
        x_name="workers",
        y_name="p95 of waits",
    )


def _apart(ticks: Sequence[float], most: float) -> list[float]:
    """Drop ticks whose labels would overlap on a logarithmic axis.

    >>> _apart([1, 2, 4, 36, 37, 38, 64], 64)
    [1, 2, 4, 36, 64]
    """
    found: list[float] = []
    for tick in ticks:
        if tick > 0 and (not found or tick / found[-1] >= most**0.06):
            found.append(tick)
    return found
