"""The short memory of how messages ended."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from heapline.core.recent_ends import Departure, GoneMemory


def column(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def thaw(memory: GoneMemory) -> GoneMemory:
    return GoneMemory.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(memory.to_state())))


def test_messages_removed_one_by_one_keep_their_own_times() -> None:
    memory = GoneMemory()
    for id in range(5):
        memory.add(column(id), "acked", 100 + id, tokens=column(id + 50))
    for remembered in (memory, thaw(memory)):
        assert [remembered.find(id) for id in range(5)] == [Departure("acked", 100 + id, None) for id in range(5)]


def test_each_end_keeps_its_kind_and_reason() -> None:
    memory = GoneMemory()
    memory.add(column(1), "dropped", 5, reason="boom")
    memory.add(column(2), "dropped", 5, reason="bang")
    memory.add(column(3, 4), "cancelled", 6)
    for remembered in (memory, thaw(memory)):
        assert remembered.find(1) == ("dropped", 5, "boom")
        assert remembered.find(2) == ("dropped", 5, "bang")
        assert remembered.find(4) == ("cancelled", 6, None)
        assert remembered.find(9) is None


def test_ack_is_remembered_by_its_token() -> None:
    memory = GoneMemory()
    memory.add(column(1), "acked", 5, tokens=column(70))
    memory.add(column(2), "acked", 6, tokens=column(71))
    memory.add(column(3), "expired", 6)
    for remembered in (memory, thaw(memory)):
        assert remembered.was_acked(1, 70)
        assert remembered.was_acked(2, 71)
        assert not remembered.was_acked(1, 71)
        assert not remembered.was_acked(3, 71)


def test_oldest_are_forgotten_first_and_the_memory_is_bounded() -> None:
    memory = GoneMemory(rows_max=1000)
    for id in range(5000):
        memory.add(column(id), "acked", id, tokens=column(id))
    remembered = [id for id in range(5000) if memory.find(id) is not None]
    assert remembered == list(range(remembered[0], 5000)), "no gaps, and the newest are there"
    assert 500 <= len(remembered) <= 1000
    assert len(memory.to_state()) <= 5, "singles gather"


def test_one_large_batch_is_remembered_completely() -> None:
    memory = GoneMemory(rows_max=10)
    memory.add(column(*range(100)), "purged", 5)
    assert memory.find(99) == ("purged", 5, None)
