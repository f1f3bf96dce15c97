"""The lake has each row of the log once, whoever archives it, however many at once, and whatever is killed meanwhile.

There is no checkpoint that could be lost: what is in the lake stands in the lake. That the archive of a topic that is
being written to survives the death of its driver is in test_sink_kill.py, too.
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


def test_archives_at_once_and_one_after_the_other_bring_each_row_once(spark: Any, tmp_path: Path) -> None:
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
        # Of messages: that the archive's own group moves on are events, too, which the next one brings.
        brought = [table.rows for result in results for table in result.tables if table.view == "messages"]
        assert (sum(brought), brought[2]) == (scene.rows, 0)
        assert differences(scene.archived(), Counter(b"%d" % i for i in range(scene.rows))) == {}


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds())
def test_long_series_of_killed_archives_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Scene(tmp_path, rows=8000, batch_rows=100) as scene:
        for _ in range(4):
            with scene.driver(seed, 0, alone=True) as one, scene.driver(seed, 0, alone=True) as two:
                assert two.wait_for(lambda told: "archiving" in told)
                time.sleep(rng.uniform(0, 1))
                if rng.random() < 0.5:
                    scene.restart_server()
                (one if rng.random() < 0.5 else two).kill()
        with scene.driver(seed, 0, alone=True) as last:
            assert last.wait_for(lambda told: "done" in told), last.everything()[-4000:]
        assert differences(scene.archived(), Counter(b"%d" % i for i in range(scene.rows))) == {}
        print(f"seed {seed}: {dict(scene.record)}")
