"""Virtual time: nothing waits, nothing is early, and a deadlock is reported."""

from __future__ import annotations

import asyncio
import random

import pytest

from heapline.clock import Clock, SteadyClock
from heapline.testing import FakeClock
from tests.simulation.fake_disk import FakeDisk, PowerCut
from tests.simulation.loop import Deadlock, SimLoop, run
from tests.simulation.sim_io import SimIo


def test_clock_moves_only_when_advanced() -> None:
    clock = FakeClock(wall_ms=5_000, boot_ms=100)
    as_clock: Clock = clock
    assert (as_clock.wall_ms(), as_clock.boot_ms()) == (5_000, 100)
    clock.advance(0.25)
    clock.jump_wall(-1)
    assert (clock.wall_ms(), clock.boot_ms()) == (4_250, 350)
    with pytest.raises(ValueError, match="jump_wall"):
        clock.advance(-1)


def test_reboot_resets_boot_time_and_steady_time_continues() -> None:
    clock = FakeClock()
    before = SteadyClock(clock).now().steady
    clock.advance(3600)
    clock.reboot()
    assert clock.boot_ms() == 0
    assert SteadyClock(clock).now().steady == before + 3_600_000


def test_sleeping_takes_virtual_time_and_drives_the_clock() -> None:
    clock = FakeClock()

    async def work() -> list[str]:
        seen: list[str] = []

        async def nap(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(f"{name} {clock.elapsed_ns // 10**9}")

        await asyncio.gather(nap("long", 86_400.0), nap("short", 5.0), nap("none", 0.0))
        return seen

    assert run(work(), clock) == ["none 0", "short 5", "long 86400"]


def test_timer_is_never_early() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        rng = random.Random(5)
        for _ in range(500):
            due = loop.time() + rng.random() * 10 ** rng.randint(-6, 4)
            fired = loop.create_future()
            loop.call_at(due, fired.set_result, None)
            await fired
            assert loop.time() >= due - 1e-6

    run(work())


def test_waiting_forever_is_reported_as_a_deadlock() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="wait forever"):
        run(work())


def test_remaining_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("cancelled")

    async def work() -> None:
        asyncio.get_running_loop().create_task(forever())
        await asyncio.sleep(0)

    run(work())
    assert ended == ["cancelled"]


def test_jobs_run_later_without_interruption_and_are_answered_after_that() -> None:
    log: list[str] = []

    async def work() -> None:
        io = SimIo(random.Random(2), mean=0.01, stall=0.0)
        jobs = [io.run(log.append, f"job {i}") for i in range(20)]
        assert log == []
        await asyncio.gather(*jobs)
        assert sorted(log) == sorted(f"job {i}" for i in range(20))
        assert log != [f"job {i}" for i in range(20)]  # concurrently, in any order
        with pytest.raises(ZeroDivisionError):
            await io.run(lambda: 1 / 0)

    run(work())


def test_after_a_power_cut_no_job_is_answered() -> None:
    cuts: list[str] = []

    async def work() -> None:
        disk = FakeDisk()
        disk.cut_power_in(0)
        io = SimIo(random.Random(1), on_power_cut=lambda: cuts.append("cut"))
        failing, later = io.run(disk.mkdir, "/d"), io.run(cuts.append, "ran")
        await asyncio.sleep(10)
        assert not failing.done()
        assert later.done() == ("ran" in cuts)
        after = io.run(cuts.append, "ran after")
        await asyncio.sleep(10)
        assert not after.done()

    run(work())
    assert "cut" in cuts
    assert "ran after" not in cuts


def test_power_cut_is_not_an_ordinary_exception() -> None:
    assert not issubclass(PowerCut, Exception)


def test_loop_can_share_a_clock_with_the_one_before_it() -> None:
    clock = FakeClock()
    for _ in range(2):
        loop = SimLoop(clock)
        loop.run_until_complete(asyncio.sleep(10))
        loop.close()
    assert clock.elapsed_ns == pytest.approx(20 * 10**9, abs=10)
