"""Filter pushdown narrows what is read, and never skips a row that matches."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.message import EPOCH, Outgoing, from_ms
from heapline.spark.options import parse_options
from heapline.spark.read_plan import Pushdown, plan_batch
from tests.unit.engine.rig import PATH, Rig, opened
from tests.unit.spark.log_rig import read_work, source_of, table

BOUNDS = {
    "GreaterThan": lambda a, b: a > b, "GreaterThanOrEqual": lambda a, b: a >= b, "LessThan": lambda a, b: a < b,
    "LessThanOrEqual": lambda a, b: a <= b, "EqualTo": lambda a, b: a == b,
}  # fmt: skip
HOW = sorted(BOUNDS)
SECONDS = st.integers(-1, 31).flatmap(lambda s: st.sampled_from([s * 1000, s * 1000 + 0.5, s * 1000 - 0.001]))


def read_where(rig: Rig, filters: list[tuple[str, str, Any]]) -> Any:
    narrowing = Pushdown()
    for column, how, value in filters:
        narrowing.add(column, how, value)
    asked = parse_options({"path": PATH, "subscribe": "jobs", "view": "events"}, streaming=False)
    return read_work(rig, plan_batch(source_of(rig), asked, narrowing), asked).to_pylist()


def passes(row: dict[str, Any], filters: list[tuple[str, str, Any]]) -> bool:
    return all(row[c] in v if how == "In" else BOUNDS[how](row[c], v) for c, how, v in filters)


@settings(max_examples=10)
@given(st.data())
async def test_pushdown_reads_all_matching_rows(data: Any) -> None:
    async with opened(topic={"partitions": 3}) as rig:
        began = from_ms(rig.clock.wall_ms())
        for i in range(30):
            await rig.hl.enqueue_batch("jobs", [Outgoing(bytes(9000), key=f"k{j}") for j in range(5 if i % 3 else 1)])
            rig.clock.advance(1)
        whole = table(rig, view="events").to_pylist()
        for _ in range(8):
            offsets = st.tuples(st.just("offset"), st.sampled_from(HOW), st.integers(0, 60))
            times = st.tuples(
                st.just("timestamp"), st.sampled_from(HOW), SECONDS.map(lambda ms: began + timedelta(milliseconds=ms))
            )  # fmt: skip
            some = st.tuples(st.just("partition"), st.just("In"), st.lists(st.integers(0, 3), max_size=3))
            topics = st.tuples(st.just("topic"), st.just("EqualTo"), st.sampled_from(["jobs", "jobs", "other"]))
            filters = data.draw(st.lists(offsets | times | some | topics, max_size=4))
            found = sorted(read_where(rig, filters), key=lambda r: (r["partition"], r["offset"]))
            assert found == [row for row in whole if passes(row, filters)]


async def test_unusable_filters_are_ignored() -> None:
    async with opened() as rig:
        await rig.hl.enqueue("jobs", b"x")
        strange = [
            ("kind", "EqualTo", "leased"), ("offset", "StringContains", "x"), ("offset", "EqualTo", "seven"),
            ("timestamp", "GreaterThan", EPOCH.replace(tzinfo=None)), ("offset", "In", []),
        ]  # fmt: skip
        assert len(read_where(rig, strange)) == 1
