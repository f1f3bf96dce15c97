"""Lifecycles and the audit on a real Spark: equal to a naive model, in one run, in parts, and kept in a table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli.pipeline import app
from heapline.contract.message import Outgoing
from heapline.spark.audit.job import audit, audit_events
from heapline.spark.jobs import lifecycle_updates as keeping
from heapline.spark.jobs.archive import archive
from heapline.spark.jobs.lake import topic_rows
from heapline.spark.jobs.lifecycle_updates import (
    TYPES,
    Extent,
    LifecycleTable,
    TableMoved,
    keep_lifecycles,
    read_lifecycles,
)
from heapline.spark.jobs.lifecycles import COLUMNS, lifecycles
from tests.spark.conftest import MARKS
from tests.spark.naive_lifecycles import followed
from tests.unit.engine.rig import opened
from tests.unit.spark.lake_rig import TasksAtOnce, reclaim
from tests.unit.spark.local_audit import audit_table
from tests.unit.spark.planted_faults import early_lease, numbered
from tests.unit.spark.random_histories import BACKOFF, TOPICS, config, events, live, standing

pytestmark = MARKS


async def lived(name: str, seed: int) -> tuple[pa.Table, Any, Any]:
    async with opened(topic={**BACKOFF, **TOPICS[name]}) as rig:
        await live(rig, Random(seed), 70)
        return await events(rig), await config(rig), await standing(rig)


@pytest.fixture(scope="module")
def lives() -> dict[str, tuple[pa.Table, Any, Any]]:
    """Random histories under each of the settings, as if in separate topics."""
    found = {}
    for name in TOPICS:
        for seed in range(3):
            topic = f"{name.replace(' ', '-')}-{seed}"
            table, settings, stands = asyncio.run(lived(name, seed))
            found[topic] = (renamed(table, topic), settings, stands)
    return found


def renamed(table: pa.Table, topic: str) -> pa.Table:
    """As if it had happened in this topic, in separate batches: a batch that spans topics is one batch."""
    batches = [None if name is None else f"{topic}/{name}" for name in table["batch_id"].to_pylist()]
    for name, values in (("topic", [topic] * table.num_rows), ("batch_id", batches)):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array(values, pa.string()))
    return table


@pytest.fixture(scope="module")
def happened(spark: Any, lives: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("events") / "all.parquet"
    import pyarrow.parquet as pq

    pq.write_table(pa.concat_tables([table for table, _, _ in lives.values()]), path)
    return spark.read.parquet(str(path))


def rows_of(df: Any) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["topic"], row["id"]): row for row in df.toArrow().to_pylist()}


def test_lifecycles_equal_a_naive_model(happened: Any, lives: dict[str, Any]) -> None:
    expected = followed([row for table, _, _ in lives.values() for row in table.to_pylist()])
    df = lifecycles(happened)
    assert tuple(df.columns) == COLUMNS
    assert dict(df.dtypes) == TYPES
    found = rows_of(df)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key] == row
    assert {row["outcome"] for row in found.values()} >= {
        "acked", "dead", "expired", "cancelled", "purged", "waiting", "delayed", "leased",
    }  # fmt: skip


def test_lifecycles_of_two_parts_equal_those_of_the_whole(happened: Any) -> None:
    cut = 60
    early = lifecycles(happened.where(f"unit <= {cut}"))
    late = lifecycles(happened.where(f"unit > {cut}"), before=early.where("not is_over"))
    assert rows_of(early.where("is_over").unionByName(late)) == rows_of(lifecycles(happened))


def test_audit_of_several_topics_equals_audits_of_each(
    spark: Any, happened: Any, lives: dict[str, Any]
) -> None:  # fmt: skip
    configs = {topic: settings for topic, (_, settings, _) in lives.items()}
    closing = {topic: stands for topic, (_, _, stands) in lives.items()}
    found = audit_events(happened, configs=configs, closing=closing)
    alone = [audit_table(table, configs, closing={t: closing[t]}) for t, (table, _, _) in lives.items()]
    assert found.refuted == ()
    for check in found.checks:
        assert check.looked_at == sum(one.check(check.name).looked_at for one in alone), check.name
    assert found.standing == {state: sum(one.standing[state] for one in alone) for state in found.standing}
    assert (found.events, found.rank_max) == (sum(one.events for one in alone), 1)


@pytest.fixture
def hl(tmp_path: Path) -> Iterator[Any]:
    with heapline.open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as broker:
        broker.create_topic("jobs", partitions=3, segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        yield broker


def work(hl: Any, count: int) -> None:
    hl.enqueue_batch("jobs", [Outgoing(b"x" * 20, i % 7, key=f"k{i % 5}") for i in range(count)])
    got = hl.pop("jobs", count // 2)
    hl.ack(got[: count // 3])
    hl.nack(got[count // 3 :], backoff=0)


def test_kept_lifecycles_equal_a_full_run_even_after_a_kill(
    spark: Any, hl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, out = {"path": str(tmp_path / "data")}, str(tmp_path / "lives")
    work(hl, 60)
    first = keep_lifecycles(spark, where, "jobs", out)
    assert first.rows == 60
    work(hl, 30)
    with monkeypatch.context() as patch:
        patch.setattr(LifecycleTable, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            keep_lifecycles(spark, where, "jobs", out)
    assert len(rows_of(read_lifecycles(spark, out))) == 60
    stale = LifecycleTable(out, keeping.TYPES)
    assert keep_lifecycles(spark, where, "jobs", out).events > 0
    assert keep_lifecycles(spark, where, "jobs", out).events == 0
    whole = rows_of(lifecycles(topic_rows(spark, where, topic="jobs")))
    assert rows_of(read_lifecycles(spark, out)) == whole
    assert len(rows_of(read_lifecycles(spark, out, over=False))) == sum(not row["is_over"] for row in whole.values())
    with pytest.raises(TableMoved, match="run again"):
        stale.commit("jobs", "data/none", Extent(1, {0: 5}))


def test_first_lifecycle_run_with_a_lake_starts_at_its_beginning(spark: Any, hl: Any, tmp_path: Path) -> None:
    where, lake = {"path": str(tmp_path / "data")}, str(tmp_path / "lake")
    work(hl, 60)
    archive(TasksAtOnce(), where, "jobs", lake, views=("events",))
    while got := hl.pop("jobs", 100):
        hl.ack(got)
    archive(TasksAtOnce(), where, "jobs", lake, views=("events",))
    reclaim(hl)
    assert all(start > 0 for start, _ in hl.offsets("jobs").values())
    archive(TasksAtOnce(), where, "jobs", lake, views=("events",), fail_on_loss=False)
    keep_lifecycles(spark, where, "jobs", str(tmp_path / "lives"), lake=lake)
    kept = rows_of(read_lifecycles(spark, str(tmp_path / "lives")))
    assert kept == rows_of(lifecycles(topic_rows(spark, where, lake, "jobs")))
    assert sum(row["payload_bytes"] == 20 for row in kept.values()) == 60


def test_audit_proves_a_journal_and_refutes_a_tampered_one(spark: Any, hl: Any, tmp_path: Path) -> None:
    work(hl, 90)
    where = {"path": str(tmp_path / "data")}
    found = audit(spark, where, "jobs")
    assert (found.refuted, found.messages, found.rank_max) == ((), 90, 1)
    reported = CliRunner().invoke(app, ["audit", "--path", where["path"], "--topic", "jobs", "--json"])
    assert reported.exit_code == 0, reported.output
    assert json.loads(reported.stdout.splitlines()[-1])["messages"] == 90


def test_audit_on_spark_reports_a_fault_with_its_message(spark: Any, lives: dict[str, Any]) -> None:
    table, settings, stands = lives["parted-1"]
    planted = numbered(early_lease(table.to_pylist()) or [])
    df = spark.createDataFrame(pa.Table.from_pylist(planted, schema=table.schema))
    found = audit_events(df, configs={"parted-1": settings}, closing={"parted-1": stands})
    assert found.refuted == ("not_early",)
    (example,) = found.check("not_early").examples
    assert example.at_ms is not None
    assert (example.topic, example.due_ms) == ("parted-1", example.at_ms + 1)
    assert example.message_id in table["message_id"].to_pylist()
