"""An observer's view of a worker pool, from its keys alone."""

from __future__ import annotations

from heapline.assign.assignment import Document, Lifecycle, Session
from heapline.assign.election import LeaderRecord
from heapline.assign.kv import Entry, encode_record
from heapline.assign.overview import Move, moves, overview
from heapline.assign.worker_ids import Standing, WorkerRecord


def worker(name: str, session: str, revision: int = 1, standing: Standing = Standing.LIVE, held: int = 0) -> Entry:
    return Entry(f"worker.{name}", encode_record(WorkerRecord(session=session, standing=standing, held=held)), revision)


def leader(name: str, released: bool = False) -> Entry:
    return Entry("leader", encode_record(LeaderRecord(worker=name, session="l", epoch=3, released=released)), 9)


def document(**changes: list[int]) -> Entry:
    """Four partitions: w-0 has two, w-2 has one, and the last is planned for w-10."""
    columns = {"targets": [0, 0, 1, 2], "holders": [0, 0, 1, -1], "fences": [2, 2, 3, 0], "revoked": [0, 0, 0, 0]}
    made = Document(
        version=7, epoch=3, writer="l", lifecycle=Lifecycle.STABLE, members={"w-0": "a", "w-2": "b", "w-10": "c"},
        sessions=[Session("w-0", "a", 1), Session("w-2", "b", 2)], workers=["w-0", "w-2", "w-10"],
        ids=["p.1", "p.2", "p.3", "p.4"], weights=[1, 2, 3, 4], **{**columns, **changes},
    )  # fmt: skip
    return Entry("assignment", made.encode(), 8)


POOL = [leader("w-2"), worker("w-0", "a", held=2), worker("w-10", "c"), worker("w-2", "b", held=1)]


def test_workers_are_sorted_by_number_with_their_partitions() -> None:
    seen = overview([*POOL, document()])
    assert [(s.worker, s.partitions, s.weight, s.leads) for s in seen.workers] == [
        ("w-0", ["p.1", "p.2"], 3, False), ("w-2", ["p.3"], 3, True), ("w-10", [], 0, False),
    ]  # fmt: skip
    assert (seen.version, seen.epoch, seen.lifecycle, seen.leader, seen.partition_count) == (7, 3, "stable", "w-2", 4)


def test_planned_partition_without_a_grant_is_coming() -> None:
    seen = overview([*POOL, document()])
    assert seen.unheld == ["p.4"]
    assert seen.workers[2].coming == ["p.4"]


def test_revoked_partition_is_leaving_its_holder_and_coming_to_the_next() -> None:
    seen = overview([*POOL, document(targets=[1, 0, 1, 2], revoked=[7, 0, 0, 0])])
    assert (seen.workers[0].partitions, seen.workers[0].leaving, seen.workers[1].coming) == (["p.2"], ["p.1"], ["p.1"])


def test_partitions_of_an_ended_session_are_unheld() -> None:
    for entry in (worker("w-0", "a", standing=Standing.ENDED), worker("w-0", "another")):
        seen = overview([leader("w-2"), entry, *POOL[2:], document()])
        assert seen.unheld == ["p.1", "p.2", "p.4"]
        assert seen.workers[0].partitions == []


def test_member_without_a_key_is_shown_as_gone() -> None:
    seen = overview([leader("w-2"), *POOL[2:], document()])
    assert (seen.workers[0].worker, seen.workers[0].standing) == ("w-0", "gone")


def test_released_leadership_shows_no_leader() -> None:
    assert overview([leader("w-2", released=True), *POOL[1:]]).leader == ""


def test_empty_store_and_foreign_values_show_nothing() -> None:
    assert overview([]).workers == []
    foreign = [
        Entry("assignment", b"\x09", 1),
        Entry("leader", b"x", 2),
        Entry("worker.w-1", b"\xff", 3),
        Entry("z", b"", 4),
    ]
    assert overview(foreign).to_dict() == overview([]).to_dict()


def test_moves_are_changed_grants_and_removed_partitions() -> None:
    before = overview([*POOL, document()])
    after = overview([*POOL, document(targets=[1, 0, 1, -1], holders=[1, -1, 1, -1], fences=[8, 2, 3, 0])])
    assert moves(before, after) == [Move("p.1", "w-0", "w-2", 8), Move("p.2", "w-0", "", 0)]
    assert moves(after, after) == []


def test_new_grant_to_the_same_worker_is_a_move() -> None:
    before, after = overview([*POOL, document()]), overview([*POOL, document(fences=[9, 2, 3, 0])])
    assert moves(before, after) == [Move("p.1", "w-0", "w-0", 9)]
