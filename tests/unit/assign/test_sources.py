"""Sources give partitions, sorted and each once, from a list, a function or a coroutine function."""

from __future__ import annotations

import threading

import pytest

from heapline.assign.errors import BadPartition
from heapline.assign.model import Partition
from heapline.assign.sources import CallableSource, PartitionSource, StaticSource

A, B = Partition(("a",), 3), Partition(("b",))


async def test_static_source_gives_its_list_in_order_until_it_is_replaced() -> None:
    source = StaticSource([B, A])
    assert await source.list_partitions() == (A, B)
    source.replace([B])
    assert await source.list_partitions() == (B,)


async def test_callable_source_asks_anew_each_time() -> None:
    answers = iter([[A], (p for p in (B, A))])
    source = CallableSource(lambda: next(answers))
    assert await source.list_partitions() == (A,)
    assert await source.list_partitions() == (A, B)


async def test_callable_source_awaits_a_coroutine_function() -> None:
    async def ask() -> list[Partition]:
        return [B, A]

    assert await CallableSource(ask).list_partitions() == (A, B)


async def test_plain_function_does_not_hold_up_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def ask() -> list[Partition]:
        threads.append(threading.current_thread())
        return [A]

    assert await CallableSource(ask).list_partitions() == (A,)
    assert threads != [threading.current_thread()]


async def test_error_of_the_function_passes_through() -> None:
    def ask() -> list[Partition]:
        raise OSError("database is down")

    with pytest.raises(OSError, match="database is down"):
        await CallableSource(ask).list_partitions()


@pytest.mark.parametrize("answer", [None, "ab", 5, [A, A], ["a"], [("a",)]])
async def test_answer_that_is_no_list_of_partitions_is_refused(answer: object) -> None:
    with pytest.raises(BadPartition):
        await CallableSource(lambda: answer).list_partitions()  # type: ignore[arg-type, return-value]
    with pytest.raises(BadPartition):
        StaticSource(answer)  # type: ignore[arg-type]


def test_source_that_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(BadPartition, match="StaticSource"):
        CallableSource([A])  # type: ignore[arg-type]


def test_own_source_by_protocol() -> None:
    class Own:
        async def list_partitions(self) -> list[Partition]:
            return []

    assert isinstance(Own(), PartitionSource)
    assert isinstance(StaticSource([]), PartitionSource)
    assert not isinstance(object(), PartitionSource)
