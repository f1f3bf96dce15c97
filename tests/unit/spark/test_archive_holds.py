"""The journal that an archive holds: everything that one of the lake's views still lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heapline import open_sync
from heapline.contract.message import Outgoing
from heapline.journal.disk import RealDisk
from heapline.journal.reclaim import read_leases
from heapline.spark.jobs.archive import _read_options, archive
from heapline.spark.lake.maintenance import drop
from heapline.spark.lake.rounds import Rounds
from heapline.spark.offsets import Subscription
from heapline.spark.target import source_of
from tests.unit.spark.lake_rig import TasksAtOnce, fill


def test_archive_leases_the_journal_for_the_view_furthest_behind(tmp_path: Path) -> None:
    """Both views are planned on one log, which has one lease. The second plan must not replace the first one's."""
    where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
    with open_sync(tmp_path / "data", spare_segment_bytes=0, reclaim_interval=3600.0) as hl:
        hl.create_topic("jobs", segment_bytes=1 << 20, max_payload_bytes=1 << 18)
        for _ in range(6):
            hl.enqueue_batch("jobs", [Outgoing(bytes(100_000))] * 5)
        archive(TasksAtOnce(), where, "jobs", lake, views=("events",))
        fill(hl, 10)
        directory = hl._broker.topics.runner("jobs").loader.directory
        held: list[int] = []

        class Watched(TasksAtOnce):
            def range(self, *args: int) -> Any:
                held.extend(lease.segment for lease in read_leases(RealDisk(), directory, 0))
                return super().range(*args)

        archive(Watched(), where, "jobs", lake)
        assert held == [1]


def test_archive_of_one_view_holds_rows_that_the_other_view_lacks(tmp_path: Path) -> None:
    """Two archives, one per view, share lake and group. The faster one must not release rows that the other needs."""
    where, lake = {"path": str(tmp_path / "data")}, tmp_path / "lake"
    with open_sync(tmp_path / "data", spare_segment_bytes=0) as hl:
        hl.create_topic("jobs")
        fill(hl, 10)
        archive(TasksAtOnce(), where, "jobs", lake)
        fill(hl, 10)
        archive(TasksAtOnce(), where, "jobs", lake, views=("messages",))
        assert _held_by(where, lake, ("messages",)) == _held_by(where, lake, ("messages", "events")) == {0: 10}
        drop(lake, "jobs")
        archive(TasksAtOnce(), where, "jobs", lake, views=("messages",))
        assert _held_by(where, lake, ("messages",)) == {0: 20}, "the other view has no rows of this topic to continue"


def _held_by(where: dict[str, str], lake: Path, views: tuple[str, ...]) -> dict[int, int]:
    """Return the offsets from which the group would hold the journal."""
    options = {view: _read_options(where, {"subscribe": "jobs"}, view, True) for view in views}
    source = source_of(options[views[0]])
    subscription = Subscription(source, options[views[0]].selection)
    subscription.find()
    found: dict[int, int] = {}

    class Group:
        def move(self, topic: str, offsets: dict[int, int]) -> None:
            found.update(offsets)

    group: Any = Group()
    Rounds(None, source, options, str(lake), group, subscription, True).hold()
    subscription.close()
    return found
