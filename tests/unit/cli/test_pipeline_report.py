"""`heapline pipeline report` and `forecast`: what reaches the jobs, and what is shown of what they found; no Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from heapline.cli.main import app
from heapline.cli.pipeline import job as preflight
from heapline.spark.jobs import forecast as forecasting
from heapline.spark.jobs import report as reporting
from tests.unit.spark.test_pages import NASTY, a_forecast, a_report


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that the jobs received."""
    found: dict[str, Any] = {}

    def job(made: Any) -> Any:
        def run(spark: Any, where: Any, topic: str, **wishes: Any) -> Any:
            wishes.pop("tell")("working")
            found.update(where=where, topic=topic, **wishes)
            return made(topic)

        return run

    monkeypatch.setattr(preflight, "start_spark", lambda master: None)
    monkeypatch.setattr(preflight, "check_topics", lambda *asked: None)
    monkeypatch.setattr(reporting, "report", job(a_report))
    monkeypatch.setattr(forecasting, "forecast", job(a_forecast))
    return found


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["pipeline", *words])


def test_report_shows_tables_writes_the_page_and_escapes_foreign_text(asked: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    nasty = NASTY.replace("\x00", "").replace("\ud800", "") + "[red]"
    printed = run(
        "report", "--path", str(tmp_path), "--topic", nasty, "--html", str(page), "--since", "24h", "--top", "3"
    )
    assert printed.exit_code == 0, printed.output
    assert asked["where"] == {"path": str(tmp_path)}
    assert asked["top"] == 3
    assert asked["since"] is not None
    for words in ("Waits by priority", "Throughput (the last 24 of 100 rows)", "Busiest keys", "[red]"):
        assert words in printed.stdout
    assert "\x1b" not in printed.stdout
    assert "<script" not in page.read_text(encoding="utf-8")


def test_report_and_forecast_print_json(asked: dict[str, Any], tmp_path: Path) -> None:
    printed = run("report", "--path", str(tmp_path), "--topic", "jobs", "--json")
    assert json.loads(printed.stdout)["priorities"][1]["wait"] == {
        "count": 10,
        "p50": 3,
        "p90": 40,
        "p99": 900,
        "max": 7000000,
    }
    printed = run("forecast", "--path", str(tmp_path), "--topic", "jobs", "--json")
    assert json.loads(printed.stdout)["workers_needed"] == 3


def test_forecast_takes_worker_counts_and_goals(asked: dict[str, Any], tmp_path: Path) -> None:
    wishes = [
        "--workers",
        "1,2,8",
        "--goal",
        "5s",
        "--goal",
        "0=250ms",
        "--growth",
        "1.5",
        "--lake",
        "l",
        "--lake-only",
    ]
    printed = run("forecast", "--topic", "jobs", *wishes)
    assert printed.exit_code == 0, printed.output
    assert (asked["workers"], asked["goal"], asked["growth"]) == ([1, 2, 8], {None: 5.0, 0: 0.25}, 1.5)
    assert (asked["lake"], asked["where"]) == ("l", None)
    assert "3 workers keep the p95 of waits within 4 s" in printed.stdout


@pytest.mark.parametrize(("words", "said"), [
    (["forecast", "--topic", "t", "--workers", "1,x"], "1,2,4,8"),
    (["forecast", "--topic", "t", "--goal", "x=1s"], "0=250ms"),
    (["report", "--topic", "t", "--html", "no/such/dir.html"], "its directory must exist"),
])  # fmt: skip
def test_invalid_options_are_refused_before_spark_starts(words: list[str], said: str) -> None:
    printed = run(*words)
    assert printed.exit_code == 2
    assert said in " ".join(printed.output.replace("│", " ").split())


def test_lake_only_needs_a_lake(asked: dict[str, Any]) -> None:
    printed = run("report", "--topic", "t", "--lake-only")
    assert printed.exit_code == 1
    assert "--lake-only needs --lake" in printed.output
    assert asked == {}
