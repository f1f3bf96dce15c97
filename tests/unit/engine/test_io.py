"""Blocking work in threads: results, errors, cancelled calls, and the threads that write."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from heapline.engine.io import WRITERS_MAX, ThreadIo


async def test_call_runs_in_a_thread_and_returns_its_result() -> None:
    io = ThreadIo()
    try:
        assert await io.run(threading.get_ident) != threading.get_ident()
        assert await io.run(divmod, 7, 2) == (3, 1)
    finally:
        io.close()


async def test_error_of_a_call_is_raised_to_its_caller() -> None:
    io = ThreadIo()
    try:
        with pytest.raises(ZeroDivisionError):
            await io.run(divmod, 7, 0)
    finally:
        io.close()


async def test_cancelled_call_does_not_run_if_it_has_not_started() -> None:
    io, ran, go_on = ThreadIo(threads=1), [], threading.Event()
    try:
        running = io.run(go_on.wait)
        waiting = io.run(ran.append, "cancelled")
        waiting.cancel()
        go_on.set()
        await io.run(ran.append, "last")
        assert ran == ["last"]
        assert await running
    finally:
        go_on.set()
        io.close()


async def test_result_of_a_cancelled_call_is_dropped() -> None:
    io, started, go_on = ThreadIo(threads=1), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait()

    try:
        call = io.run(work)
        await asyncio.to_thread(started.wait)
        call.cancel()
        go_on.set()
        await io.run(int)
        assert call.cancelled()
    finally:
        go_on.set()
        io.close()


async def test_write_runs_in_a_thread_and_reports_its_result_on_the_loop() -> None:
    io, ended = ThreadIo(), asyncio.get_running_loop().create_future()
    try:
        io.write(threading.get_ident, (), lambda *end: ended.set_result((*end, threading.get_ident())))
        writer, error, reporter = await ended
        assert (writer != threading.get_ident(), error, reporter) == (True, None, threading.get_ident())
    finally:
        io.close()


async def test_write_reports_its_error() -> None:
    io, ended = ThreadIo(), asyncio.get_running_loop().create_future()
    try:
        io.write(divmod, (7, 0), lambda *end: ended.set_result(end))
        result, error = await ended
        assert result is None
        assert isinstance(error, ZeroDivisionError)
    finally:
        io.close()


async def test_slow_write_does_not_delay_the_write_of_another_topic() -> None:
    io, go_on, ended = ThreadIo(), threading.Event(), asyncio.get_running_loop().create_future()
    try:
        io.write(go_on.wait, (), lambda *end: None)
        io.write(int, (), lambda *end: ended.set_result(end))
        assert await ended == (0, None)
    finally:
        go_on.set()
        io.close()


async def test_writes_of_many_topics_share_a_few_threads() -> None:
    io, go_on, ended = ThreadIo(), threading.Event(), asyncio.get_running_loop().create_future()
    ends: list[object] = []

    def done(*end: object) -> None:
        ends.append(end)
        if len(ends) == 1000:
            ended.set_result(None)

    try:
        before = threading.active_count()
        for _ in range(1000):
            io.write(go_on.wait, (), done)
        assert threading.active_count() - before == WRITERS_MAX
        go_on.set()
        await ended
        assert set(ends) == {(True, None)}
    finally:
        go_on.set()
        io.close()


async def test_writes_in_sequence_use_one_thread() -> None:
    io, ended, threads = ThreadIo(), asyncio.get_running_loop().create_future(), set()

    def done(thread: int, error: BaseException | None) -> None:
        threads.add(thread)
        steps.pop()
        if steps:
            io.write(threading.get_ident, (), done)
        else:
            ended.set_result(None)

    try:
        steps = list(range(100))
        io.write(threading.get_ident, (), done)
        await ended
        assert len(threads) == 1
    finally:
        io.close()


async def test_failing_report_does_not_lose_the_reports_after_it() -> None:
    loop = asyncio.get_running_loop()
    io, go_on, problems, reports = ThreadIo(), threading.Event(), asyncio.Queue(), asyncio.Queue()
    loop.set_exception_handler(lambda _, context: problems.put_nowait(context["exception"]))

    def fails(*end: object) -> None:
        raise LookupError("report")

    try:
        for done in (fails, lambda *end: reports.put_nowait(end)) * 3:
            io.write(go_on.wait, (), done)
        go_on.set()
        for _ in range(3):
            assert await reports.get() == (True, None)
            assert isinstance(await problems.get(), LookupError)
    finally:
        go_on.set()
        io.close()


class Startable(threading.Thread):
    """A thread of a system that allows only so many."""

    left = 0

    def start(self) -> None:
        if Startable.left == 0:
            raise RuntimeError("can't start new thread")
        Startable.left -= 1
        super().start()


async def test_writes_share_the_threads_that_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.engine.io.Thread", Startable)
    io, go_on, ends = ThreadIo(), threading.Event(), asyncio.Queue()
    try:
        Startable.left = 1
        for _ in range(3):
            io.write(go_on.wait, (), lambda *end: ends.put_nowait(end))
        go_on.set()
        async with asyncio.timeout(10):
            assert [await ends.get() for _ in range(3)] == [(True, None)] * 3
    finally:
        go_on.set()
        io.close()


async def test_write_without_any_thread_reports_an_error_later_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("heapline.engine.io.Thread", Startable)
    io, ends = ThreadIo(), asyncio.Queue()
    try:
        Startable.left = 0
        io.write(int, (), lambda *end: ends.put_nowait(end))
        assert ends.empty()
        result, error = await ends.get()
        assert (result, str(error)) == (None, "can't start new thread")
        Startable.left = 1
        io.write(int, (), lambda *end: ends.put_nowait(end))
        async with asyncio.timeout(10):
            assert await ends.get() == (0, None)
    finally:
        io.close()


async def test_close_waits_for_the_writes_handed_over_and_refuses_others() -> None:
    io, written, go_on = ThreadIo(), [], threading.Event()
    for number in range(20):
        io.write(lambda n: go_on.wait() and written.append(n), (number,), lambda *end: None)
    go_on.set()
    io.close()
    assert sorted(written) == list(range(20))
    with pytest.raises(RuntimeError, match="after close"):
        io.write(int, (), lambda *end: None)


def test_write_that_outlives_its_event_loop_ends_quietly() -> None:
    go_on, reported = threading.Event(), []

    async def hand_over() -> ThreadIo:
        io = ThreadIo()
        io.write(go_on.wait, (), lambda *end: reported.append(end))
        return io

    io = asyncio.run(hand_over())
    go_on.set()
    io.close()  # joins the thread; pytest turns an exception in it into a failure
    assert reported == []


def test_threads_of_a_forgotten_io_end() -> None:
    before = set(threading.enumerate())

    async def forget() -> None:
        io, ended = ThreadIo(), asyncio.get_running_loop().create_future()
        io.write(int, (), lambda *end: ended.set_result(end))
        await ended

    asyncio.run(forget())
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
