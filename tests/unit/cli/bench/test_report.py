"""The bench report: percentiles, ratios to the baselines, and a table for 80 columns."""

from __future__ import annotations

import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from heapline.cli.bench import Report, report_json, report_table
from heapline.cli.bench.load import Measurement, percentile

SAMPLES = [n / 1000 for n in range(1, 101)]  # 1 to 100 ms


def measured(name: str, messages: int, **given: Any) -> Measurement:
    return Measurement(name, messages, **{"seconds": 2.0, "samples": SAMPLES, "each": "call", **given})


def report() -> Report:
    made = Report("server queue.example:7400", 256, 64, 2.0)
    made.rows = [
        measured("enqueue, 100 a call", 1_000_000), measured("full cycle, 1 a call", 3000, calls=3),
        measured("delivery, 100 a second", 200), measured("fsynced writes of 100", 4_000_000, is_baseline=True),
        measured("fsynced writes of 1", 2000, samples=[0.001], is_baseline=True),
        measured("bare TCP calls", 4000, is_baseline=True),
    ]  # fmt: skip
    names = [row.name for row in made.rows]
    made.baselines = {names[0]: names[3], names[1]: names[5], names[2]: names[4]}
    made.by_time = {names[2]}
    return made


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([1, 50, 95, 99, 100]))
def test_percentile_is_the_smallest_sample_with_that_rank(samples: list[float], percent: int) -> None:
    found = percentile(samples, percent)
    assert sum(sample <= found for sample in samples) * 100 >= len(samples) * percent
    assert found == min(samples) or sum(sample < found for sample in samples) * 100 < len(samples) * percent


def test_ratio_compares_rates_per_call_or_median_times() -> None:
    made = report()
    assert [made.ratio(row) for row in made.rows] == [0.25, 2.25, 50.0, None, None, None]


def test_two_parts_of_a_measurement_are_joined() -> None:
    whole = measured("x", 100, samples=[1.0]).plus(measured("x", 300, samples=[3.0], seconds=8.0))
    assert (whole.messages, whole.seconds, whole.rate, list(whole.samples)) == (400, 10.0, 40, [1.0, 3.0])


def test_table_fits_into_80_columns_and_names_the_baseline_of_each_load() -> None:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(report_table(report()))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells[1] == ["enqueue, 100 a call", "500 000", "50 ms", "95 ms", "99 ms", "0.25× A"]
    assert cells[2][-1] == "2.25× C"
    assert cells[3] == ["delivery, 100 a second", "", "50 ms", "95 ms", "99 ms", "50× B"]
    assert [row[0] for row in cells[4:]] == ["A  fsynced writes of 100", "B  fsynced writes of 1", "C  bare TCP calls"]


def test_json_separates_loads_and_baselines() -> None:
    output = report_json(report())
    assert [row["name"] for row in output["baselines"]] == [
        "fsynced writes of 100", "fsynced writes of 1", "bare TCP calls",
    ]  # fmt: skip
    assert output["loads"][0] == {
        "name": "enqueue, 100 a call", "messages": 1_000_000, "seconds": 2.0, "rate": 500_000.0, "p50_ms": 50.0,
        "p95_ms": 95.0, "p99_ms": 99.0, "of_each": "call",
        "baseline": {"name": "fsynced writes of 100", "of": "rate", "ratio": 0.25},
    }  # fmt: skip
    assert output["loads"][2]["baseline"] == {"name": "fsynced writes of 1", "of": "time", "ratio": 50.0}
