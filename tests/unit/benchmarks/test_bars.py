"""The charts of docs/benchmarks.md: drawn from its tables, to scale, and up to date."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as command
from benchmarks import bars

TABLE = """
| lifecycle, 100 × 16, next to redis | 80,000 messages/s | 20,000 messages/s | 4× | – | – |
| lifecycle, 100 × 16, next to redis: CPU of server and client | 5.5 µs/message | 11 µs/message | 0.5× | – | – |
| lifecycle, 100 × 16, next to awa | – | – | – | ≥ 5× | missing |
| lifecycle, 100 × 16, next to the wire client | 1 messages/s | 1 messages/s | 1× | – | – |
| tasks, empty handler, 64 at once, next to celery-everysec | 9,000 tasks/s | 900 tasks/s | 10× | – | – |
"""


def test_only_rows_next_to_peers_are_found() -> None:
    assert bars.pairs_of(TABLE) == {
        ("lifecycle", False): [bars.Pair("redis", 80_000.0, 20_000.0, "messages/s")],
        ("lifecycle", True): [bars.Pair("redis", 5.5, 11.0, "µs/message")],
        ("tasks", False): [bars.Pair("celery-everysec", 9_000.0, 900.0, "tasks/s")],
    }


def test_bars_are_to_scale_and_labeled_with_their_values(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(TABLE)
    files = bars.draw(page)
    assert [path.name for path in files] == ["peers-rate.svg", "peers-cpu.svg", "tasks-rate.svg"]
    picture = ElementTree.parse(files[0]).getroot()
    drawn = [e for e in picture.iter("{http://www.w3.org/2000/svg}rect") if e.get("x") == str(bars.LEFT)]
    ours, theirs = (float(rect.get("width", "0")) for rect in drawn)
    assert ours == pytest.approx(4 * theirs, rel=0.01)
    text = "".join(picture.itertext())
    assert "80,000 messages/s" in text
    assert "prefers-color-scheme: dark" in text


def test_charts_in_docs_match_the_published_tables(tmp_path: Path) -> None:
    page = bars.PAGE.read_text(encoding="utf-8")
    for key, pairs in bars.pairs_of(page).items():
        name, title = bars.CHARTS[key]
        drawn = (bars.DOCS / "benchmarks" / name).read_text(encoding="utf-8")
        assert drawn == bars.svg(title, pairs), "run python -m benchmarks report"
        assert f"benchmarks/{name}" in page


def test_report_accepts_no_module() -> None:
    assert command.parse(["report"]).suite == "report"
    with pytest.raises(SystemExit):
        command.parse(["report", "--only", "heap"])
