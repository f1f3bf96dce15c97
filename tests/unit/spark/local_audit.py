"""The audit of an Arrow table in this process, without Spark: the same functions that Spark's tasks call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.spark.audit.facts import Balances, facts_of
from heapline.spark.audit.histories import judge
from heapline.spark.audit.report import AuditResult, make_report, rank
from heapline.spark.audit.steps import Steps, collect_marks, from_arrow, joined, merge_marks


def audit_table(
    events: Any,
    configs: Mapping[str, Any],
    *,
    closing: Balances | None = None,
    opening: Steps | None = None,
    examples_max: int = 10,
) -> AuditResult:
    """Audit a table.

    `events` is an Arrow table with the columns `steps.NEEDS` of the view, `configs` has the settings by topic.
    """
    names = sorted(set(events["topic"].to_pylist()))
    facts = facts_of(names, *merge_marks([collect_marks(events)]), configs, closing, opened=opening is not None)
    steps = from_arrow(events, {name: number for number, name in enumerate(names)})
    if opening is not None:
        steps = joined([steps, opening])
    findings = [judge(steps.take(steps.topic == n), n, t, examples_max) for n, t in enumerate(facts.topics)]
    ranked = [
        rank(part.intervals, part.topic, rule, examples_max)
        for part, rule in zip(findings, facts.rules, strict=True)
        if rule is not None and part.intervals is not None
    ]
    return make_report(facts, findings, ranked, examples_max)
