"""HTML pages: one file, strict XML, and untrusted text is harmless in a browser and a terminal."""

from __future__ import annotations

import doctest
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.cli.pipeline import report as cli
from heapline.spark import metrics
from heapline.spark.jobs import forecast, pages, plots, queue_simulation, report
from heapline.spark.jobs import report_page as report_page_module
from heapline.spark.jobs.forecast import Forecast, Wait, WorkerPool
from heapline.spark.jobs.pages import Section, page, printable
from heapline.spark.jobs.report import Bucket, Counted, Delays, OfPriority, Percentiles, Report
from heapline.spark.jobs.report_page import (
    forecast_lead,
    forecast_page,
    forecast_sections,
    report_page,
    report_sections,
)

NASTY = "</svg><script>alert(1)</script> \x1b[31m \x00 \u202e \ud800 & \" ' ]]> -->"
SVG = "{http://www.w3.org/1999/xhtml}svg"
NOTHING = Percentiles(0, None, None, None, None)


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def a_report(word: str = "out of stock") -> Report:
    some = Percentiles(10, 3, 40, 900, 7_000_000)
    return Report(
        word, 0, 9_000_000, 30, 40, 5, 2,
        (OfPriority(None, 30, 1, some, some), OfPriority(0, 10, 0, some, NOTHING), OfPriority(7, 20, 1, NOTHING, some)),
        60, tuple(Bucket(60_000 * n, n, n // 2) for n in range(100)), (Counted("acked", 29), Counted(word, 1)),
        (Counted("1", 5),), (Counted(word, 1), Counted("", 1)), Delays(NOTHING, some), (Counted(word, 9),), 9,
    )  # fmt: skip


def a_forecast(topic: str = "jobs", priorities: tuple[int | None, ...] = (None, 0, 7)) -> Forecast:
    def waits(workers: int) -> tuple[Wait, ...]:
        return tuple(Wait(p, 10, 5000 / workers, 10 / workers, 9000 / workers, 9500 / workers, 1e4) for p in priorities)

    pools = tuple(WorkerPool(n, 0.9 / n, waits(n), n > 2) for n in (1, 2, 3, 8))
    return Forecast(topic, 20, 0.5, 60.0, 0.3, 900.0, 1.5, {"": 4000.0}, waits(1), pools, 3, 1)


def test_report_page_is_valid_xml_with_labeled_plots_and_tables() -> None:
    for text in (report_page(a_report()), forecast_page(a_forecast())):
        root = parsed(text)
        plotted = list(root.iter(SVG))
        assert plotted
        for section in root.iter("{http://www.w3.org/1999/xhtml}section"):
            assert section.find(".//{*}table/{*}tbody/{*}tr/{*}td") is not None
        ids = [node.get("id") for node in root.iter() if node.get("id")]
        assert len(ids) == len(set(ids))
        for svg in plotted:
            assert svg.get("role") == "img"
            assert set((svg.get("aria-labelledby") or "").split()) <= set(ids)
            assert svg[0].tag.endswith("title")
            assert svg[0].text


def test_page_loads_nothing_from_elsewhere() -> None:
    text = report_page(a_report())
    assert re.findall(r"https?://[^\"\s]+", text) == ["http://www.w3.org/1999/xhtml"]  # the name of the language
    assert not re.search(r"<script|<img|<link|<iframe|@import|url\(|\son\w+=", text)
    assert "default-src 'none'" in text


def test_untrusted_text_is_escaped() -> None:
    for text in (report_page(a_report(NASTY)), forecast_page(a_forecast(NASTY))):
        root = parsed(text)
        assert not list(root.iter("{*}script"))
        assert "alert(1)" in "".join(root.itertext())
        assert not set("\x00\x1b\u202e\ud800") & set(text)


@settings(max_examples=40)
@given(st.text(max_size=200))
def test_page_escapes_any_text(word: str) -> None:
    shown = printable(word)
    assert len(shown) <= 80
    assert shown.isprintable()
    section = Section(word, word, (word, "n"), ((word, "1"),), plot=plots.bars("x", word, word, [(word, 1.0, word)]))
    root = parsed(page(word, word, [section]))
    assert [cell.text or "" for cell in root.iter("{http://www.w3.org/1999/xhtml}td")] == [printable(word, 1000), "1"]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 1e13), st.floats(0, 1e12)), min_size=1, max_size=12),
    st.booleans(),
)
def test_plot_lines_stay_within_the_plot(points: list[tuple[float, float]], is_time: bool) -> None:
    points.sort()
    highest = max(y for _, y in points)
    x = plots.time_axis(points[0][0], points[-1][0]) if is_time else plots.number_axis(points[-1][0])
    y = plots.duration_axis(highest) if is_time else plots.number_axis(highest)
    text = plots.lines("n", "t", "d", [plots.Series("a", points)], x, y, height=260)
    (line,) = re.findall(r'<polyline class="line s0" points="([^"]*)"', text)
    for place in line.split():
        h, v = map(float, place.split(","))
        assert plots.LEFT - 0.1 <= h <= plots.WIDTH - plots.RIGHT + 0.1
        assert plots.TOP - 0.1 <= v <= 220.1
    assert 1 <= len(x.ticks) <= 9
    ET.fromstring(text)


def test_empty_report_is_a_valid_page() -> None:
    empty = Report(
        "jobs", None, None, 0, 0, 0, 0, (OfPriority(None, 0, 0, NOTHING, NOTHING),), 1, (), (), (), (), None, (), 0
    )
    assert report_sections(empty) == []
    assert "No messages were enqueued" in "".join(parsed(report_page(empty)).itertext())


@pytest.mark.parametrize(("goals", "needed", "said"), [
    ({}, None, "0.5 per second"), ({"": 4000.0}, None, "Even 4 096 workers do not keep the p95 of waits within 4 s"),
    ({"0": 1000.0, "": 4000.0}, 1, "1 worker keeps the p95 of waits within 1 s for priority 0, 4 s"),
])  # fmt: skip
def test_forecast_lead_has_the_answer(goals: dict[str, float], needed: int | None, said: str) -> None:
    found = replace(a_forecast(), goals_ms=goals, workers_needed=needed, arrivals_per_second=0.5)
    assert said in forecast_lead(found)


def test_single_priority_has_no_section_of_its_own() -> None:
    assert [s.title for s in forecast_sections(a_forecast(priorities=(None, 5)))] == ["Workers and waits"]
    assert [s.title for s in forecast_sections(a_forecast())] == ["Workers and waits", "Waits by priority"]


@pytest.mark.parametrize("module", [pages, plots, forecast, report_page_module, queue_simulation, metrics, report, cli])
def test_docstring_examples_pass(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
