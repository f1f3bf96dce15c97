"""A report as sections: the same tables for the terminal and for the HTML page, which also has the plots."""

from __future__ import annotations

from heapline.spark.jobs import plots
from heapline.spark.jobs.pages import Section, count, duration, moment, page, share
from heapline.spark.jobs.report import Counted, OfPriority, Percentiles, Report

RANKS = ("p50", "p90", "p99", "max")
_WAIT = "From the due time of a message to its first lease. Smaller priorities go first."
_SERVICE = (
    "From the last lease to the end. If a worker leases many messages at once and acks them one by one, the later ones "
    "look slow."
)


def report_page(report: Report) -> str:
    return page(f"Topic {report.topic}", lead(report), sections(report))


def lead(report: Report) -> str:
    if report.first_ms is None or report.last_ms is None:
        return "No messages were enqueued in this period."
    return (
        f"{count(report.messages)} messages enqueued since {moment(report.first_ms)}, followed until "
        f"{moment(report.last_ms)}: {count(report.deliveries)} deliveries, {count(report.retries)} retries, "
        f"{count(report.lease_expiries)} expired leases."
    )


def sections(report: Report) -> list[Section]:
    """Return the sections that have rows."""
    found = [
        _counted("Outcomes", "The outcome of each message.", "outcome", report.outcomes, report.messages),
        _spread(report, "Waits by priority", _WAIT, "wait"),
        _spread(report, "Service times by priority", _SERVICE, "service"),
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


def _spread(report: Report, title: str, note: str, field: str) -> Section:
    def of(row: OfPriority) -> Percentiles:
        found: Percentiles = getattr(row, field)
        return found

    names: tuple[str, ...] = ("priority", "messages", *RANKS)
    shown = [row for row in report.priorities if of(row).count or field == "wait"]
    if not any(of(row).count for row in shown):
        return Section(title, note, names, ())
    rows: list[tuple[str, ...]] = [(_priority(row), count(of(row).count), *_ranks(of(row))) for row in shown]
    if field == "wait":
        names = (*names, "never leased")
        rows = [(*cells, count(row.never_leased)) for cells, row in zip(rows, shown, strict=True)]
    right = tuple(range(1, len(names)))
    drawn = [
        (f"priority {_priority(row)}" if row.priority is not None else "all", tuple(map(float, values)))
        for row in shown
        if None not in (values := _values(of(row)))
    ]
    summary = "; ".join(f"{label}: median {duration(v[0])}, p99 {duration(v[2])}" for label, v in drawn[:8])
    return Section(title, note, names, tuple(rows), right, plots.ranges(field, title, summary, RANKS, drawn))


def _priority(row: OfPriority) -> str:
    return "all" if row.priority is None else str(row.priority)


def _values(of: Percentiles) -> tuple[int, ...]:
    return of.p50, of.p90, of.p99, of.max  # type: ignore[return-value]  # either all are None, or none is


def _ranks(of: Percentiles) -> tuple[str, ...]:
    return tuple(duration(value) for value in _values(of))


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
    title = "Scheduler delay"
    note = (
        "For messages with a delivery time: how long after it they became ready, and how long after it they were "
        "leased. If only the second is shown, the log does not record when messages became ready."
    )
    names, right = ("from the due time", "messages", *RANKS), (1, 2, 3, 4, 5)
    if report.delays is None:
        return Section(title, note, names, ())
    found = [("until ready", report.delays.to_ready), ("until leased", report.delays.to_leased)]
    shown = [(label, of) for label, of in found if of.count]
    rows = tuple((label, count(of.count), *_ranks(of)) for label, of in shown)
    drawn = [(label, tuple(map(float, _values(of)))) for label, of in shown]
    summary = "; ".join(f"{label}: median {duration(v[0])}, p99 {duration(v[2])}" for label, v in drawn)
    return Section(
        title, note, names, rows, right, plots.ranges("delay", title, summary, RANKS, drawn) if drawn else ""
    )
