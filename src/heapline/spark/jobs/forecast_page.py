"""A forecast as sections: the same tables for the terminal and for the page, which has the plot as well."""

from __future__ import annotations

from collections.abc import Sequence

from heapline.spark.jobs import plots
from heapline.spark.jobs.figures import amount, count, duration, share
from heapline.spark.jobs.forecast import WORKERS_MAX, Crowd, Forecast, Wait
from heapline.spark.jobs.pages import Section, page

LINES_MAX = 6  # priorities in the plot
_RIGHT = tuple(range(1, 8))


def forecast_page(forecast: Forecast) -> str:
    return page(f"Topic {forecast.topic}: how many workers?", lead(forecast), sections(forecast))


def lead(forecast: Forecast) -> str:
    grown = "" if forecast.growth == 1.0 else f", taken {amount(forecast.growth)} times"
    part = "" if forecast.sampled == 1.0 else f" A sample of {share(forecast.sampled, 1.0)} of the past."
    return (
        f"{count(forecast.messages)} messages in {duration(forecast.seconds * 1000)}{grown}: "
        f"{amount(forecast.arrivals_per_second)} a second, each of which takes a worker "
        f"{duration(forecast.service_mean_ms)}.{part} {answer(forecast)}"
    )


def answer(forecast: Forecast) -> str:
    floor = f"Below {forecast.floor} workers the line would only grow. " if forecast.floor > 1 else ""
    if not forecast.goals_ms:
        return floor.strip()
    goals = ", ".join(
        f"{duration(ms)}{f' for priority {name}' if name else ''}" for name, ms in forecast.goals_ms.items()
    )
    if forecast.workers_needed is None:
        return f"{floor}Not even {count(WORKERS_MAX)} workers keep the p95 of waits within {goals}."
    workers = f"{count(forecast.workers_needed)} worker{'s keep' if forecast.workers_needed > 1 else ' keeps'}"
    return f"{floor}{workers} the p95 of waits within {goals}."


def sections(forecast: Forecast) -> list[Section]:
    names = ("workers", "busy", "goal", "mean", "p50", "p95", "p99", "max")
    rows = tuple((count(c.workers), share(c.busy, 1.0), _kept(c), *_figures(c.waits[0])) for c in forecast.crowds)
    if forecast.observed:
        rows = (*rows, ("as it was", "–", "–", *_figures(forecast.observed[0])))
    note = (
        "Waits from being ready to being taken by a worker, if the past came again. The goal is kept if it is kept for "
        "every priority. Fetching and acking cost nothing here, so real waits are a little longer."
    )
    found = [Section("Workers and waits", note, names, rows, tuple(range(8)), _plot(forecast))]
    by_priority = _by_priority(forecast)
    return [*found, by_priority] if by_priority.rows else found


def _kept(crowd: Crowd) -> str:
    return "–" if crowd.meets_goal is None else "kept" if crowd.meets_goal else "missed"


def _figures(wait: Wait) -> tuple[str, ...]:
    return tuple(duration(value) for value in (wait.mean, wait.p50, wait.p95, wait.p99, wait.max))


def _by_priority(forecast: Forecast) -> Section:
    names = ("workers", "priority", "messages", "mean", "p50", "p95", "p99", "max")
    crowds = [(count(c.workers), c.waits) for c in forecast.crowds] + [("as it was", forecast.observed)]
    rows = tuple(
        (workers, str(wait.priority), count(wait.messages), *_figures(wait))
        for workers, waits in crowds
        for wait in waits
        if wait.priority is not None and len(waits) > 2  # of a single one all is said already
    )
    note = "The same by priority. Smaller priorities go first; work that has begun is not interrupted."
    return Section("Waits by priority", note, names, rows, _RIGHT)


def _plot(forecast: Forecast) -> str:
    crowds = forecast.crowds
    kinds = [wait.priority for wait in crowds[0].waits[: LINES_MAX + 1]]
    if len(kinds) == 2:
        kinds = kinds[:1]  # a single priority is all of them
    series = [
        plots.Series(
            "all" if kind is None else f"priority {kind}",
            [(c.workers, wait.p95) for c in crowds for wait in c.waits if wait.priority == kind],
        )
        for kind in kinds
    ]
    most = max(crowd.workers for crowd in crowds)
    goals = list(forecast.goals_ms.values())
    goal = goals[0] if len(goals) == 1 else None
    ticks = sorted({c.workers for c in crowds}) if len(crowds) <= 10 else plots.number_axis(most).ticks
    x = plots.Axis(min(c.workers for c in crowds), most, _apart(ticks, most), amount, is_log=True)
    y = plots.duration_axis(max(goal or 0, *(value for one in series for _, value in one.points)))
    told = "; ".join(f"{c.workers} workers: {duration(c.waits[0].p95)}" for c in crowds[:12])
    return plots.lines(
        "workers", "p95 of waits by number of workers", told, series, x, y, goal,
        x_name="workers", y_name="p95 of waits",
    )  # fmt: skip


def _apart(ticks: Sequence[float], most: float) -> list[float]:
    """Without those that would be written over one another, on a logarithmic axis.

    >>> _apart([1, 2, 4, 36, 37, 38, 64], 64)
    [1, 2, 4, 36, 64]
    """
    found: list[float] = []
    for tick in ticks:
        if tick > 0 and (not found or tick / found[-1] >= most**0.06):
            found.append(tick)
    return found
