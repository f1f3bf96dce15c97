"""Dead letters in the order of their deaths, compared with a sorted list; and the cost of a page."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, SupportsIndex

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from heapline.core.dead_letters import BEFORE_ALL, CHUNK_ROWS, Dead, DeadLetters, outdated
from heapline.core.record import size_bound
from heapline.engine.snapshot_state import Frozen


def column(values: Any) -> npt.NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def thaw(letters: DeadLetters) -> DeadLetters:
    """Return the content of a snapshot."""
    return DeadLetters.from_state(msgspec.msgpack.decode(Frozen(letters.to_state(), {}).encode()))


class Model:
    """A model that keeps the letters in a dictionary."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.letters = DeadLetters()
        self.rows: dict[int, Dead] = {}
        self.at = 0
        self.next_id = 1

    def bury(self) -> None:
        """Add messages in any order of their ids, often at the same time as earlier ones."""
        self.at += self.random.choice((0, 0, 0, 1, 500))
        count = self.random.choice((1, 3, 700, 2500))
        ids = [id for id in range(self.next_id, self.next_id + 2 * count) if id not in self.rows]
        ids = self.random.sample(ids, min(count, len(ids)))
        self.next_id += self.random.choice((0, 2 * count))
        if not ids:
            return
        reason = self.random.choice(("boom", "bang", ""))
        self.letters.add(column(ids), column(id << 8 for id in ids), column(-id for id in ids), reason, self.at)
        self.rows |= {id: Dead(id << 8, -id, reason, self.at) for id in ids}

    def take(self) -> None:
        in_order = [id for _, id in self.order()]
        start = self.random.randrange(len(in_order) + 1)
        chosen = in_order[start : start + self.random.choice((1, 40, 1500))]
        if self.random.random() < 0.5:
            chosen = self.random.sample(in_order, len(chosen))
        if chosen:
            keys, positions = self.letters.take(column(chosen))
            gone = [self.rows.pop(id) for id in chosen]
            assert keys.tolist() == [dead.key for dead in gone]
            assert positions.tolist() == [dead.position for dead in gone]

    def move(self) -> None:
        ids = sorted(self.random.sample(range(self.next_id), min(50, self.next_id)))
        self.letters.replace_positions(column(ids), column((id << 20) for id in ids))
        moved = {id: self.rows[id]._replace(position=id << 20) for id in ids if id in self.rows}
        self.rows |= moved

    def order(self) -> list[tuple[int, int]]:
        return sorted((dead.at, id) for id, dead in self.rows.items())

    def check(self, letters: DeadLetters) -> None:
        order = self.order()
        assert len(letters) == len(order)
        assert letters.nbytes == sum(size_bound(column([dead.position])).item() for dead in self.rows.values())
        assert letters.last() == (order[-1] if order else BEFORE_ALL)
        assert [place for *place, _ in letters.after(BEFORE_ALL)] == [list(place) for place in order]
        assert letters.rows().ids.tolist() == [id for _, id in order]
        assert letters.rows().reasons.tolist() == [self.rows[id].reason for _, id in order]
        for at, id in self.random.sample(order, min(20, len(order))):
            assert letters.get(id) == letters[id] == self.rows[id]
            assert letters.at((at, id)) == (at, id, self.rows[id].position)
            assert letters.at((at + 1, id)) is None
            rest = [(at, id) for at, id, _ in islice(letters.after((at, id)), 100)]
            start = order.index((at, id)) + 1
            assert rest == order[start : start + 100]
        for id in range(self.next_id, self.next_id + 5):
            assert (id in letters) == (id in self.rows)
            assert letters.get(id) == self.rows.get(id)


@pytest.mark.parametrize("seed", range(8))
def test_letters_equal_a_sorted_list_of_them(seed: int) -> None:
    model = Model(seed)
    model.check(model.letters)
    for _ in range(30):
        model.random.choice((model.bury, model.bury, model.take, model.move))()
        model.check(model.letters)
    model.check(thaw(model.letters))


def test_taking_a_letter_that_does_not_exist_names_it() -> None:
    letters = DeadLetters()
    letters.add(column([1, 2]), column([1, 2]), column([1, 2]), "boom", 5)
    with pytest.raises(KeyError, match="3"):
        letters.take(column([1, 3]))
    with pytest.raises(KeyError, match="3"):
        letters[3]


def test_rows_keep_their_attempts_when_their_records_move() -> None:
    letters = DeadLetters()
    letters.add(column([1, 2]), column([0x103, 0x204]), column([0, 0]), "boom", 5)
    letters.replace_positions(column([2, 9]), column([0x900, 0xA00]))
    assert [letters[1].position, letters[2].position] == [0x103, 0x904]


class CountedChunks(list[Any]):
    """The chunks of a table; counts the rows of those that are read."""

    rows_read = 0

    def __getitem__(self, number: SupportsIndex | slice) -> Any:
        found = super().__getitem__(number)
        self.rows_read += len(found.ids)
        return found

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all chunks are read")


@pytest.mark.parametrize("count", [6_000, 200_000])
def test_page_reads_the_same_rows_however_many_letters_there_are(count: int) -> None:
    letters = DeadLetters()
    for first in range(0, count, 1000):
        ids = column(range(first, first + 1000))
        letters.add(ids, ids, ids, "boom", first)
    letters._chunks = chunks = CountedChunks(letters._chunks)
    page = list(islice(letters.after((count // 2, count // 2 + 10)), 100))
    assert page == [(count // 2, id, id) for id in range(count // 2 + 11, count // 2 + 111)]
    assert chunks.rows_read <= 2 * CHUNK_ROWS


def naive_outdated(rows: list[tuple[int, int, int, int]], until: int, most: int, most_bytes: int) -> list[int]:
    """Return the ids of the rows (at, id, size, partition) to delete: the oldest, while any limit is exceeded."""
    left, gone = sorted(rows), []
    while left and (
        left[0][0] <= until
        or (most and len(left) > most)
        or (most_bytes and sum(size for _, _, size, _ in left) > most_bytes)
    ):
        gone.append(left.pop(0)[1])
    return gone


@pytest.mark.parametrize("seed", range(60))
def test_outdated_letters_are_the_oldest_of_all_partitions(seed: int) -> None:
    rng = random.Random(seed)
    partitions = [DeadLetters() for _ in range(rng.choice((1, 3)))]
    rows: list[tuple[int, int, int, int]] = []
    for id in rng.sample(range(1000), rng.choice((0, 1, 40))):
        number, at, position = rng.randrange(len(partitions)), rng.randrange(50), rng.randrange(1 << 20) << 8
        partitions[number].add(column([id]), column([position]), column([0]), "boom", at)
        rows.append((at, id, size_bound(column([position])).item(), number))
    total = sum(size for _, _, size, _ in rows)
    until, most, most_bytes = rng.choice((-1, 25)), rng.choice((0, 10, 60)), rng.choice((0, total // 2, 2 * total))
    expected = naive_outdated(rows, until, most, most_bytes)
    found = outdated(partitions, until, most, most_bytes, 1000)
    assert [sorted(ids) for ids in found] == [
        sorted(id for _, id, _, n in rows if n == number and id in expected) for number in range(len(partitions))
    ]
    some = outdated(partitions, until, most, most_bytes, 7)
    assert sorted(id for ids in some for id in ids) == sorted(expected[:7])
