"""The fixture directories can be read by Spark without opening them in an engine first."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from heapline.cli.journal.contents import Selection
from heapline.cli.journal.contents import rows as dumped
from heapline.cli.journal.topic_files import find_topics
from heapline.journal import RealDisk
from heapline.spark.directory import DirectorySource
from heapline.spark.options import parse_options
from heapline.spark.read_plan import plan_batch, read
from heapline.spark.schema import arrow_schema

FIXTURES = Path(__file__).parents[2] / "fixtures"


def table(path: Path, topic: str, view: str) -> list[dict[str, Any]]:
    asked = parse_options({"path": str(path), "subscribe": topic, "view": view}, streaming=False)
    source = DirectorySource(str(path))
    batches = [batch for work in plan_batch(source, asked) for batch in read(source, work, asked)]
    found = pa.Table.from_batches(batches, arrow_schema(asked.columns))
    rows: list[dict[str, Any]] = found.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist()
    return rows


@pytest.mark.parametrize("version", ["v1"])
def test_fixture_log_reads_as_in_the_engine(version: str, tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / version / "data.tar.xz") as kept:
        kept.extractall(tmp_path, filter="data")
    (catalog,) = tmp_path.rglob("catalog.json")
    known = {ref.topic for ref in DirectorySource(str(catalog.parent)).topics()}
    places = [place for place in find_topics(catalog.parent).topics if place.topic in known]
    seen = 0
    for place in places:
        events = table(catalog.parent, place.topic, "events")
        expected = sorted(
            dumped(RealDisk(), place, Selection(), running=True),
            key=lambda row: (row["partition"], row["offset"]),
        )  # fmt: skip
        assert [(e["partition"], e["offset"], e["kind"], e["id"]) for e in events] == [
            (t["partition"], t["offset"], t["kind"], t.get("id")) for t in expected
        ]  # fmt: skip
        seen += len(events)
        new = sum(e["kind"] in ("enqueued", "batch_committed") and e["id"] is not None for e in events)
        assert len(table(catalog.parent, place.topic, "messages")) == new
    assert seen > 50
