"""Each row becomes one message, whatever is killed: drivers, workers, the server.

The quick form is one seed and one kill of the driver. `HEAPLINE_SOAK_SEEDS=0-9` with `-m soak` runs many.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.spark.conftest import MARKS
from tests.spark.kill_rig import Scene, disturb, seeds

pytestmark = MARKS


def test_sink_is_exactly_once_if_driver_and_server_are_killed(tmp_path: Path) -> None:
    with Scene(tmp_path, rows=2000, batch_rows=200) as scene:
        scene.check(disturb(scene, seed=3, runs=1))
        assert scene.record["zombies"] >= 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds())
def test_many_kills_neither_lose_nor_duplicate_rows(tmp_path: Path, seed: int) -> None:
    with Scene(tmp_path, rows=12_000, batch_rows=300) as scene:
        scene.check(disturb(scene, seed, runs=5))
        print(f"seed {seed}: {dict(scene.record)}")


def test_deleted_checkpoint_makes_a_new_query(spark: Any, tmp_path: Path) -> None:
    """A sink knows a query by its checkpoint. Deleting that requests the rows again, and they are written again."""
    with Scene(tmp_path, rows=100, batch_rows=100) as scene:
        queries = set()
        for _ in range(2):
            rows = spark.readStream.format("heapline").options(**scene.where, subscribe="in", columns="value")
            writer = rows.option("startingOffsets", "earliest").load().writeStream.format("heapline")
            writer = writer.options(**scene.where).option("topic", "out").trigger(availableNow=True)
            query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
            query.awaitTermination()
            queries.add(f"query:{query.id}")
            shutil.rmtree(tmp_path / "checkpoint")
        assert set(scene.values("out").values()) == {2}
        with scene.client() as hl:
            assert {sink.name for sink in hl.list_sinks()} == queries
        assert len(queries) == 2
