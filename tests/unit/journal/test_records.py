"""Messages by position: from memory or disk they are what was written, and a damaged one is reported."""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.journal.records import MERGE_GAP_BYTES, OPEN_FILES_MAX, CacheBudget
from tests.unit.journal.rig import PATH, MemoryDisk, commit, open_journal, put, write_units

pytestmark = pytest.mark.usefixtures("both_accelerators")

I64 = npt.NDArray[np.int64]
Batches = list[list[tuple[bytes, bytes]]]

message = st.tuples(
    st.one_of(st.binary(max_size=50), st.integers(0, 5000).map(lambda n: b"p" * n)), st.binary(max_size=30)
)


@given(st.lists(st.lists(message, min_size=1, max_size=6), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_records_from_memory_and_from_disk_are_what_was_written(batches: Batches, rng: object) -> None:
    journal, _ = open_journal(MemoryDisk(), cache_budget=CacheBudget(12_000))
    placed: list[int] = []
    for number, batch in enumerate(batches):
        placed += put(journal, [p for p, _ in batch], smalls=[s for _, s in batch], first_id=100 * number).tolist()
        commit(journal)
    wanted = list(zip(placed, [m for batch in batches for m in batch], strict=True))
    rng.shuffle(wanted)  # type: ignore[attr-defined]
    positions = np.array([p for p, _ in wanted], np.int64)
    for records in (journal.read(positions), journal.load(positions)):
        assert records.payloads == [payload for _, (payload, _) in wanted]
        assert records.smalls == [small for _, (_, small) in wanted]
        assert records.rows["payload_len"].tolist() == [len(payload) for _, (payload, _) in wanted]
        assert not records.bad


def test_position_with_attempts_reads_the_same_record() -> None:
    journal, _ = open_journal(MemoryDisk())
    positions = put(journal, [b"one", b"two"])
    commit(journal)
    assert journal.cached(positions | 200)[0].payloads == [b"one", b"two"]
    assert journal.load(positions | 200).payloads == [b"one", b"two"]


def test_no_positions_return_no_records() -> None:
    journal, _ = open_journal(MemoryDisk())
    none = np.empty(0, np.int64)
    assert journal.read(none).payloads == []
    assert journal.load(none).payloads == []


def test_oldest_blocks_leave_memory_first_and_budget_is_kept() -> None:
    budget = CacheBudget(5000)
    journal, _ = open_journal(MemoryDisk(), cache_budget=budget)
    placed = write_units(journal, [1000] * 20)
    assert budget.used_bytes <= 5000
    missing = [i for i, positions in enumerate(placed) if len(journal.cached(positions)[1])]
    assert missing == list(range(len(missing)))
    assert 10 < len(missing) < 20
    assert journal.read(np.concatenate(placed)).payloads == [bytes([n % 251 + 1]) * 1000 for n in range(1, 21)]


def test_blocks_not_yet_written_stay_in_memory_whatever_the_budget() -> None:
    journal, _ = open_journal(MemoryDisk(), cache_budget=CacheBudget(100))
    placed = [put(journal, [b"x" * 500], first_id=n) for n in range(5)]
    assert len(journal.cached(np.concatenate(placed))[1]) == 0
    commit(journal)
    put(journal, [b"next"], first_id=9)
    assert len(journal.cached(np.concatenate(placed))[1]) == 5


def test_caches_share_a_budget_and_the_idle_one_shrinks() -> None:
    budget = CacheBudget(10_000)
    idle, _ = open_journal(MemoryDisk(), cache_budget=budget)
    busy, _ = open_journal(MemoryDisk(), cache_budget=budget)
    write_units(idle, [1000] * 8)
    write_units(busy, [1000] * 9)
    assert len(idle.cache) == 0
    assert budget.used_bytes <= 10_000
    for journal in (busy, idle):
        journal.close()
        journal.cache.clear()
    assert budget.used_bytes == 0


def test_many_small_blocks_keep_their_positions_as_the_cache_turns_over() -> None:
    journal, _ = open_journal(MemoryDisk(), segment_bytes=1 << 20, cache_budget=CacheBudget(96 * 300))
    placed: list[int] = []
    for number in range(1500):
        placed += put(journal, [b"%d" % number], first_id=number).tolist()
        if number % 50 == 49:
            commit(journal)
    records, missing = journal.cached(np.array(placed, np.int64))
    assert 0 < len(missing) < 1500
    for index in sorted(set(range(1500)) - set(missing.tolist())):
        assert records.payloads[index] == b"%d" % index
        assert records.rows["id"][index] == index


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damaged_byte_is_reported_for_its_record_alone() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    positions = put(journal, [b"first payload", b"second", b"third"], smalls=[b"a", b"bb", b"ccc"])
    commit(journal)
    path = f"{PATH}/0000000001.seg"
    data = disk.files[path].data
    start = int(journal.layout.byte_offset(positions)[1])
    row = journal.load(positions).rows[1]
    touched = [
        *range(start, start + 80),
        *range(start + int(row["small_at"]), start + int(row["small_at"]) + 2),
        *range(start + int(row["payload_at"]), start + int(row["payload_at"]) + 6),
    ]
    for at in touched:
        data[at] ^= 0x11
        records = journal.load(positions)
        data[at] ^= 0x11
        assert list(records.bad) == [1], at
        assert (records.bad[1].path, records.bad[1].offset) == (path, start)
        assert records.payloads == [b"first payload", b"", b"third"]
        assert records.smalls == [b"a", b"", b"ccc"]
        assert records.rows["id"].tolist() == [1, 0, 3]


def test_invalid_lengths_do_not_cause_huge_reads() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    positions = put(journal, [b"x"])
    commit(journal)
    start = int(journal.layout.byte_offset(positions)[0])
    disk.files[f"{PATH}/0000000001.seg"].data[start + 8 : start + 24] = b"\xff" * 16
    asked: list[int] = []
    file_type = type(disk.open(f"{PATH}/0000000001.seg"))
    original = file_type.pread

    def counting(self: object, n: int, off: int) -> bytes:
        asked.append(n)
        return original(self, n, off)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_type, "pread", counting)
        assert list(journal.load(positions).bad) == [0]
    assert sum(asked) < 1 << 20


def test_read_error_on_one_record_leaves_the_others() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk)
    placed = write_units(journal, [2000, 2000, 2000])
    positions = np.concatenate(placed)
    starts = journal.layout.byte_offset(positions).tolist()
    file_type = type(disk.open(f"{PATH}/0000000001.seg"))
    original = file_type.pread

    def failing(self: object, n: int, off: int) -> bytes:
        if off < starts[1] + 90 and off + n > starts[1]:
            raise OSError(errno.EIO, "bad sector")
        return original(self, n, off)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_type, "pread", failing)
        records = journal.load(positions)
    assert list(records.bad) == [1]
    assert records.payloads == [b"\2" * 2000, b"", b"\4" * 2000]


def test_position_into_a_missing_segment_is_bad_not_fatal() -> None:
    journal, _ = open_journal(MemoryDisk())
    positions = put(journal, [b"x"])
    commit(journal)
    elsewhere = journal.layout.pack(9, np.array([512]), np.array([0]), 0)
    records = journal.load(np.concatenate([elsewhere, positions]))
    assert list(records.bad) == [0]
    assert records.payloads == [b"", b"x"]


# --- reads ------------------------------------------------------------------------------------------------------------


def reads_of(disk: MemoryDisk, action: object) -> int:
    disk.log.clear()
    action()  # type: ignore[operator]
    return sum(what == "pread" for what, _ in disk.log)


def test_batch_costs_two_reads_and_a_single_message_one() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=1 << 20)
    lone = put(journal, [b"x" * 300], smalls=[b"key"])
    commit(journal)
    put(journal, [bytes(100_000)])
    commit(journal)
    batch = put(journal, [b"y" * 200] * 1000)
    commit(journal)
    assert reads_of(disk, lambda: journal.load(lone)) == 1
    assert reads_of(disk, lambda: journal.load(batch)) <= 2
    assert reads_of(disk, lambda: journal.load(np.concatenate([batch, lone]))) <= 3


def test_nearby_records_are_read_together_and_distant_ones_apart() -> None:
    disk = MemoryDisk()
    journal, _ = open_journal(disk, segment_bytes=4 << 20)
    placed = write_units(journal, [1000] * 100)
    near = np.concatenate(placed[:10])
    far = np.concatenate([placed[0], placed[99]])
    assert MERGE_GAP_BYTES < 99 * 1500
    assert reads_of(disk, lambda: journal.load(near)) == 1
    assert reads_of(disk, lambda: journal.load(far)) == 2


def test_few_files_stay_open() -> None:
    journal, _ = open_journal(MemoryDisk(), segment_bytes=4096)
    placed = write_units(journal, [2000] * (OPEN_FILES_MAX + 9))
    assert journal.load(np.concatenate(placed)).payloads == [
        bytes([n % 251 + 1]) * 2000 for n in range(1, OPEN_FILES_MAX + 10)
    ]
    assert len(journal.records._handles) == OPEN_FILES_MAX
