"""Rows in are messages out, none lost, none doubled, whatever is killed: drivers, workers, the server.

The quick form is one seed and one kill of the driver. `HEAPLINE_SOAK_SEEDS=0-9` with `-m soak` runs whole series.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.conftest import MARKS
from tests.spark.kill_rig import Scene, disturb, seeds

pytestmark = MARKS


def test_rows_in_are_messages_out_though_driver_and_server_are_killed_and_tasks_throw(tmp_path: Path) -> None:
    with Scene(tmp_path, rows=2000, batch_rows=200) as scene:
        scene.check(disturb(scene, seed=3, runs=1))
        assert scene.record["zombies"] >= 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds())
def test_long_series_of_kills_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    with Scene(tmp_path, rows=12_000, batch_rows=300) as scene:
        scene.check(disturb(scene, seed, runs=5))
        print(f"seed {seed}: {dict(scene.record)}")
