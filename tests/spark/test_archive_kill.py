"""The lake has each row of the log once, with any number of archives and whatever is killed.

There is no checkpoint that could be lost: the lake records its own end. test_sink_kill.py also kills the archive of a
topic that is being written to.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.spark.conftest import MARKS
from tests.spark.kill_rig import Scene, differences, seeds

pytestmark = MARKS


def test_killed_and_concurrent_archives_add_each_row_once(spark: Any, tmp_path: Path) -> None:
    from heapline.spark.jobs.archive import archive

    with Scene(tmp_path, rows=2000, batch_rows=200) as scene:
        results: list[Any] = []
        work = lambda: results.append(archive(spark, scene.where, "in", scene.lake, round_rows=500))  # noqa: E731
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        work()
        # Compare messages only: moves of the archive's own group are events too, which the next archive adds.
        brought = [table.rows for result in results for table in result.tables if table.view == "messages"]
        assert (sum(brought), brought[2]) == (scene.rows, 0)
        assert differences(scene.archived(), Counter(b"%d" % i for i in range(scene.rows))) == {}


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds())
def test_many_killed_archives_neither_lose_nor_duplicate_rows(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Scene(tmp_path, rows=8000, batch_rows=100) as scene:
        for _ in range(4):
            with scene.driver(seed, 0, alone=True) as one, scene.driver(seed, 0, alone=True) as two:
                assert two.wait_for(lambda reported: "archiving" in reported)
                time.sleep(rng.uniform(0, 1))
                if rng.random() < 0.5:
                    scene.restart_server()
                (one if rng.random() < 0.5 else two).kill()
        with scene.driver(seed, 0, alone=True) as last:
            assert last.wait_for(lambda reported: "done" in reported), last.everything()[-4000:]
        assert differences(scene.archived(), Counter(b"%d" % i for i in range(scene.rows))) == {}
        print(f"seed {seed}: {dict(scene.record)}")
