"""Sources return partitions, sorted and distinct, from a list, a function or a coroutine function."""

from __future__ import annotations

import threading

import pytest

from heapline.assign.errors import BadPartition
from heapline.assign.partitions import CallableSource, Partition, PartitionSource, StaticSource

A, B = Partition(("a",), 3), Partition(("b",))


async def test_static_source_returns_its_sorted_list_until_replaced() -> None:
    source = StaticSource([B, A])
    assert await source.list_partitions() == (A, B)
    source.replace([B])
    assert await source.list_partitions() == (B,)


async def test_callable_source_calls_its_function_each_time() -> None:
    answers = iter([[A], (p for p in (B, A))])
    source = CallableSource(lambda: next(answers))
    assert await source.list_partitions() == (A,)
    assert await source.list_partitions() == (A, B)


async def test_callable_source_awaits_a_coroutine_function() -> None:
    async def ask() -> list[Partition]:
        return [B, A]

    assert await CallableSource(ask).list_partitions() == (A, B)


async def test_plain_function_does_not_block_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def ask() -> list[Partition]:
        threads.append(threading.current_thread())
        return [A]

    assert await CallableSource(ask).list_partitions() == (A,)
    assert threads != [threading.current_thread()]


async def test_error_of_the_function_propagates() -> None:
    def ask() -> list[Partition]:
        raise OSError("database is down")

    with pytest.raises(OSError, match="database is down"):
        await CallableSource(ask).list_partitions()


@pytest.mark.parametrize("answer", [None, "ab", 5, [A, A], ["a"], [("a",)]])
async def test_source_result_must_be_a_list_of_partitions(answer: object) -> None:
    with pytest.raises(BadPartition):
        await CallableSource(lambda: answer).list_partitions()  # type: ignore[arg-type, return-value]
    with pytest.raises(BadPartition):
        StaticSource(answer)  # type: ignore[arg-type]


def test_uncallable_source_is_rejected_immediately() -> None:
    with pytest.raises(BadPartition, match="StaticSource"):
        CallableSource([A])  # type: ignore[arg-type]


def test_any_object_with_list_partitions_is_a_source() -> None:
    class Own:
        async def list_partitions(self) -> list[Partition]:
            return []

    assert isinstance(Own(), PartitionSource)
    assert isinstance(StaticSource([]), PartitionSource)
    assert not isinstance(object(), PartitionSource)
