"""The dashboard and the alerts use only metrics that a live server exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from heapline.wire.descriptors import pb
from tests.integration.server_rig import Rig
from tests.integration.test_metrics import go_through_a_life, samples, scrape

DEPLOY = Path(__file__).parents[2] / "deploy"
WORDS = {
    "sum", "max", "min", "avg", "by", "on", "and", "or", "unless", "rate", "increase", "absent", "histogram_quantile",
    "predict_linear", "label_values",
}  # fmt: skip
_NO_NAMES = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|on)\s*\([^)]*\)')


def names_in(expression: str) -> set[str]:
    """Return the metrics in a PromQL expression."""
    bare = _NO_NAMES.sub(" ", expression)
    return {word for word in re.findall(r"\b[a-zA-Z_]\w*", bare) if word not in WORDS}


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana" / "heapline.json").read_text())
    return read


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def asked_for() -> set[str]:
    targets = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    topics = next(v for v in dashboard()["templating"]["list"] if v["name"] == "topic")["query"]["query"]
    names = [names_in(expression) for expression in [*targets, *(rule["expr"] for rule in alerts())]]
    return set().union(*names, names_in(topics) - {"topic"})


def test_names_are_found_in_expressions() -> None:
    text = (
        'histogram_quantile(0.9, sum by (le, topic) (rate(a_bucket{x=~"$y"}[$__rate_interval]))) / on (b) c > 1e3 * d'
    )
    assert names_in(text) == {"a_bucket", "c", "d"}


async def test_server_exposes_every_metric_of_dashboard_and_alerts(
    tmp_path: Path,
) -> None:
    async with Rig(tmp_path) as rig:
        await go_through_a_life(rig)
        stream = rig.wire.calls.stream("ReadLog", pb.ReadLogRequest(topic="jobs"))
        async for _ in stream:
            pass
        rig.server.metrics.watch(
            "fsync_latency_ms", rig.behind.topics.runner("jobs").counters.commit.tally
        )  # a fake disk
        reported = {sample.name for sample in samples((await scrape(rig)).text)}
    wanted = asked_for()
    assert len(wanted) > 35
    assert wanted - reported == set()


def test_dashboard_can_be_imported_by_grafana() -> None:
    read = dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(read)
    rows = [panel["title"] for panel in read["panels"] if panel["type"] == "row"]
    assert {"Rates", "Latencies", "Backlog", "Leases and retries", "Storage", "Process"} <= set(rows)
    numbers = [panel["id"] for panel in read["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in read["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"]
            assert {t["refId"] for t in panel["targets"]} == {chr(65 + i) for i in range(len(panel["targets"]))}
            assert all(t["expr"].count("(") == t["expr"].count(")") for t in panel["targets"])
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) > 10
    for rule in alerts():
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("page", "ticket")
