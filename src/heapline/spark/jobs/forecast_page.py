"""A forecast as sections: the same tables for the terminal and for the HTML page, which also has the plot."""

from __future__ import annotations

from collections.abc import Sequence

from heapline.spark.jobs import plots
from heapline.spark.jobs.forecast import WORKERS_MAX, Forecast, Wait, WorkerPool
from heapline.spark.jobs.pages import Section, amount, count, duration, page, share

LINES_MAX = 6  # priorities in the plot
_RIGHT = tuple(range(1, 8))


def forecast_page(forecast: Forecast) -> str:
    return page(f"Topic {forecast.topic}: how many workers?", lead(forecast), sections(forecast))


def lead(forecast: Forecast) -> str:
    grown = "" if forecast.growth == 1.0 else f", multiplied by {amount(forecast.growth)}"
    part = "" if forecast.sampled == 1.0 else f" Based on a sample of {share(forecast.sampled, 1.0)} of the past."
    return (
        f"{count(forecast.messages)} messages in {duration(forecast.seconds * 1000)}{grown}: "
        f"{amount(forecast.arrivals_per_second)} per second, each of which takes a worker "
        f"{duration(forecast.service_mean_ms)}.{part} {answer(forecast)}"
    )


def answer(forecast: Forecast) -> str:
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


def sections(forecast: Forecast) -> list[Section]:
    names = ("workers", "busy", "goal", "mean", "p50", "p95", "p99", "max")
    rows = tuple((count(c.workers), share(c.busy, 1.0), _goal_text(c), *_values(c.waits[0])) for c in forecast.crowds)
    if forecast.observed:
        rows = (*rows, ("observed", "–", "–", *_values(forecast.observed[0])))
    note = (
        "Waits from being ready to being leased, if the past repeated itself. The goal is met if every priority meets "
        "it. Fetching and acking are assumed to cost nothing, so real waits are slightly longer."
    )
    found = [Section("Workers and waits", note, names, rows, tuple(range(8)), _plot(forecast))]
    by_priority = _by_priority(forecast)
    return [*found, by_priority] if by_priority.rows else found


def _goal_text(pool: WorkerPool) -> str:
    return "–" if pool.meets_goal is None else "met" if pool.meets_goal else "missed"


def _values(wait: Wait) -> tuple[str, ...]:
    return tuple(duration(value) for value in (wait.mean, wait.p50, wait.p95, wait.p99, wait.max))


def _by_priority(forecast: Forecast) -> Section:
    names = ("workers", "priority", "messages", "mean", "p50", "p95", "p99", "max")
    pools = [(count(c.workers), c.waits) for c in forecast.crowds] + [("observed", forecast.observed)]
    rows = tuple(
        (workers, str(wait.priority), count(wait.messages), *_values(wait))
        for workers, waits in pools
        for wait in waits
        if wait.priority is not None and len(waits) > 2  # a single priority is the same as all
    )
    note = "Waits by priority. Smaller priorities go first; work that has started is not interrupted."
    return Section("Waits by priority", note, names, rows, _RIGHT)


def _plot(forecast: Forecast) -> str:
    pools = forecast.crowds
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
