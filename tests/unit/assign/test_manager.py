"""A manager as its user sees it: starting, stopping, hooks that fail or hang, leases that are lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise

import pytest

from heapline.assign.config import Config, RetryConfig
from heapline.assign.election import KVElection
from heapline.assign.errors import (
    AssignmentVersionMismatch,
    BadConfig,
    BadStrategy,
    ConnectionLost,
    ElectionFailed,
    ShutdownTimeout,
    StableIDExhausted,
    StartupTimeout,
)
from heapline.assign.hooks import Hooks
from heapline.assign.kv import Entry
from heapline.assign.manager import Manager
from heapline.assign.memory_kv import MemoryKV
from heapline.assign.model import Assignment, Partition, State
from heapline.assign.records import ASSIGNMENT_KEY, Standing, WorkerRecord, decode, encode, worker_key
from tests.unit.assign.crowd_rig import Crowd, held, in_virtual_time, until

QUICK = Config(
    worker_id_max=3, cold_start_window=2.0, planned_scale_window=1.0,
    retry=RetryConfig(initial_delay=1.0, max_delay=4.0),
)  # fmt: skip


class DeadKV(MemoryKV):
    """Whatever is asked of it, it does not answer while `is_dead`."""

    is_dead = False

    async def _maybe(self) -> None:
        while self.is_dead:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        await self._maybe()
        return await super().create(key, value, ttl=ttl)

    async def update(self, key: str, value: bytes, revision: int, *, ttl: float | None = None) -> int:
        await self._maybe()
        return await super().update(key, value, revision, ttl=ttl)

    async def get(self, key: str) -> Entry | None:
        await self._maybe()
        return await super().get(key)

    async def entries(self, prefix: str) -> list[Entry]:
        await self._maybe()
        return await super().entries(prefix)


class SilentKV(MemoryKV):
    """Watchers hear nothing."""

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        await asyncio.Event().wait()
        yield None


def alone(crowd: Crowd, kv: MemoryKV) -> None:
    crowd.kv = kv


# --- starting


def test_manager_that_was_not_started_says_so() -> None:
    crowd = Crowd()

    @in_virtual_time
    async def scenario() -> None:
        manager = crowd.manager()
        assert (manager.worker_id, manager.is_leader, manager.state) == ("", False, State.INIT)
        assert manager.assignment == Assignment()
        assert not manager.holds(Partition(("p", "00")))
        assert manager.fence(Partition(("p", "00"))) is None
        with pytest.raises(ConnectionLost):
            await manager.refresh_partitions()

    scenario()


@in_virtual_time
async def test_started_manager_holds_what_its_hook_was_told() -> None:
    crowd = Crowd(partitions=3, config=QUICK)
    [manager] = await crowd.started(1)
    assert (manager.worker_id, manager.is_leader, manager.state) == ("worker-0", True, State.STABLE)
    assert crowd.calls[manager] == [(["p.00", "p.01", "p.02"], [])]
    first = Partition(("p", "00"))
    assert manager.holds(first)
    assert manager.fence(first) == manager.assignment.fence(first) == manager.assignment.version


@in_virtual_time
async def test_manager_is_started_once() -> None:
    crowd = Crowd(config=QUICK)
    [manager] = await crowd.started(1)
    with pytest.raises(BadConfig):
        await manager.start()


@in_virtual_time
async def test_ids_that_are_all_taken_make_start_fail_within_startup_timeout() -> None:
    crowd = Crowd(config=QUICK)
    await crowd.started(4)
    began = crowd.now()
    with pytest.raises(StableIDExhausted):
        await crowd.manager().start()
    assert crowd.now() - began == pytest.approx(30, abs=2.1)


@in_virtual_time
async def test_store_that_does_not_answer_makes_start_fail_within_startup_timeout() -> None:
    crowd = Crowd(config=QUICK)
    kv = DeadKV(crowd.now)
    kv.is_dead = True
    with pytest.raises(ConnectionLost):
        await crowd.manager(kv=kv).start()
    assert crowd.now() == pytest.approx(30, abs=2.1)


@in_virtual_time
async def test_election_that_does_not_answer_makes_start_fail() -> None:
    class Undecided(KVElection):
        async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
            await asyncio.Event().wait()
            return False

    crowd = Crowd(config=QUICK)
    with pytest.raises(ElectionFailed):
        await crowd.manager(election=Undecided(crowd.kv, crowd.now)).start()


@in_virtual_time
async def test_source_that_fails_makes_start_fail_and_gives_back_the_id() -> None:
    class Broken:
        async def list_partitions(self) -> list[Partition]:
            raise OSError("no database")

    crowd = Crowd(config=QUICK)
    manager = Manager(QUICK, crowd.kv, Broken(), clock=crowd.now)
    with pytest.raises(StartupTimeout):
        await manager.start()
    assert manager.state is State.SHUTDOWN
    entry = await crowd.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode(entry.value, WorkerRecord)
    assert record is not None
    assert record.standing is Standing.RELEASED


@in_virtual_time
async def test_strategy_that_leaves_partitions_out_changes_nothing() -> None:
    class Forgetful:
        def assign(self, workers: Sequence[str], partitions: Sequence[Partition], previous: object = None) -> dict:  # type: ignore[type-arg]
            return {workers[0]: list(partitions)[1:]}

    crowd = Crowd(config=QUICK)
    with pytest.raises(StartupTimeout):
        await crowd.manager(strategy=Forgetful()).start()
    assert any(isinstance(error, BadStrategy) for error in crowd.errors)


# --- stopping


@in_virtual_time
async def test_stop_drops_through_the_hook_and_then_gives_back_id_and_lead() -> None:
    crowd = Crowd(partitions=2, config=QUICK)
    [manager] = await crowd.started(1)
    await manager.stop()
    assert crowd.calls[manager] == [(["p.00", "p.01"], []), ([], ["p.00", "p.01"])]
    assert manager.state is State.SHUTDOWN
    assert not manager.is_leader
    assert manager.assignment.partitions == ()
    began = crowd.now()
    [again] = await crowd.started(1)
    assert again.worker_id == "worker-0"
    assert again.is_leader
    assert crowd.now() - began < 1
    await manager.stop()  # does nothing


@in_virtual_time
async def test_hook_that_hangs_makes_stop_fail_in_time_and_gives_nothing_back() -> None:
    crowd = Crowd(partitions=2, config=QUICK)
    hangs = asyncio.Event()

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        if removed:
            await hangs.wait()

    manager = crowd.manager(hook=hook)
    await manager.start()
    began = crowd.now()
    with pytest.raises(ShutdownTimeout) as caught:
        await manager.stop()
    assert crowd.now() - began == pytest.approx(10, abs=0.1)
    assert caught.value.undropped == 2
    entry = await crowd.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode(entry.value, WorkerRecord)
    assert record is not None
    assert record.standing is Standing.LIVE


@in_virtual_time
async def test_manager_that_was_never_started_stops() -> None:
    crowd = Crowd(config=QUICK)
    manager = crowd.manager()
    await manager.stop()
    assert manager.state is State.SHUTDOWN
    with pytest.raises(BadConfig):
        await manager.start()


@in_virtual_time
async def test_removed_document_is_reported_and_nothing_is_granted_beside_it() -> None:
    crowd = Crowd(partitions=4, config=QUICK)
    [first] = await crowd.started(1)
    entry = await crowd.kv.get(ASSIGNMENT_KEY)
    assert entry is not None
    await crowd.kv.delete(ASSIGNMENT_KEY, entry.revision)
    second = crowd.manager()
    with pytest.raises(StartupTimeout):
        await second.start()
    assert len(first.assignment.partitions) == 4
    assert any(isinstance(error, AssignmentVersionMismatch) for error in crowd.errors)


# --- hooks


@in_virtual_time
async def test_hook_that_hangs_does_not_hold_up_heartbeats() -> None:
    crowd = Crowd(partitions=2, config=QUICK)

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        await asyncio.sleep(25)

    manager = crowd.manager(hook=hook)
    starting = asyncio.create_task(manager.start())
    for _ in range(20):
        await asyncio.sleep(1)
        entry = await crowd.kv.get(worker_key("worker-0"))
        assert entry is not None
    record = decode(entry.value, WorkerRecord)
    assert record is not None
    assert record.beats >= 9
    await starting
    assert len(manager.assignment.partitions) == 2


@in_virtual_time
async def test_removal_that_fails_is_repeated_and_not_confirmed_before_it_succeeds() -> None:
    crowd = Crowd(partitions=4, config=QUICK)
    tries: list[float] = []

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        if removed:
            tries.append(crowd.now())
            if len(tries) < 6:
                raise OSError("the disk is busy")

    first = crowd.manager(hook=hook)
    await first.start()
    [second] = await crowd.started(1)
    await until(lambda: tries)
    moved = {p.id for p in first.assignment.partitions}
    while len(tries) < 6:
        await asyncio.sleep(0.01)
        if len(tries) < 6:
            assert len(first.assignment.partitions) == 4
            assert len(second.assignment.partitions) == 0
    waits = [round(after - before, 1) for before, after in pairwise(tries)]
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    await asyncio.sleep(1)
    assert len(second.assignment.partitions) == 2
    assert {p.id for p in second.assignment.partitions} < moved
    assert any(isinstance(error, OSError) for error in crowd.errors)


@in_virtual_time
async def test_hooks_are_never_called_at_the_same_time() -> None:
    crowd = Crowd(config=QUICK)
    running = calls = 0

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        nonlocal running, calls
        running, calls = running + 1, calls + 1
        assert running == 1
        await asyncio.sleep(3)
        running -= 1

    manager = crowd.manager(hook=hook)
    await manager.start()
    await crowd.started(1)
    crowd.source.replace((await crowd.source.list_partitions())[2:])
    await manager.refresh_partitions()
    await asyncio.sleep(1.5)
    await manager.stop()
    assert calls >= 3
    assert not any(isinstance(error, AssertionError) for error in crowd.errors)


@in_virtual_time
async def test_other_hooks_that_raise_disturb_nobody() -> None:
    async def fails(*told: object) -> None:
        raise RuntimeError("the user's fault")

    crowd = Crowd(partitions=1, config=QUICK)
    manager = Manager(
        QUICK, crowd.kv, crowd.source, clock=crowd.now, hooks=Hooks(on_state_changed=fails, on_error=fails)
    )  # fmt: skip
    await manager.start()
    await asyncio.sleep(5)
    assert manager.state is State.STABLE


async def test_plain_function_as_a_hook_is_called_in_a_thread() -> None:
    """In real time: a function that blocks must not hold up the event loop."""
    told: list[tuple[int, bool]] = []
    here = threading.current_thread()

    def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        told.append((len(added) - len(removed), threading.current_thread() is here))

    crowd = Crowd(partitions=2)
    config = Config(cold_start_window=0.0, heartbeat_interval=0.05, heartbeat_ttl=5.0)
    manager = Manager(config, MemoryKV(), crowd.source, hooks=Hooks(on_assignment_changed=hook))
    await manager.start()
    await manager.stop()
    assert told == [(2, False), (-2, False)]


# --- leases


@in_virtual_time
async def test_worker_that_cannot_renew_stops_its_partitions_before_its_lease_can_end_elsewhere() -> None:
    crowd = Crowd(partitions=2, config=QUICK)
    kv = DeadKV(crowd.now)
    alone(crowd, kv)
    [manager] = await crowd.started(1)
    await asyncio.sleep(10)
    kv.is_dead = True
    cut_at = crowd.now()
    await until(lambda: not manager.assignment.partitions)
    assert 3.0 <= crowd.now() - cut_at <= 5.1  # 5/6 of 6 s after a renewal that was at most 2 s old
    assert crowd.calls[manager][-1] == ([], ["p.00", "p.01"])


@in_virtual_time
async def test_worker_that_hangs_in_its_hook_holds_nothing_when_its_lease_is_over() -> None:
    crowd = Crowd(partitions=2, config=QUICK)
    kv = DeadKV(crowd.now)
    alone(crowd, kv)
    stuck = asyncio.Event()

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        if removed:
            await stuck.wait()

    manager = crowd.manager(hook=hook)
    await manager.start()
    kv.is_dead = True
    await asyncio.sleep(5.8)
    assert not manager.holds(Partition(("p", "00")))
    assert manager.fence(Partition(("p", "00"))) is None


@in_virtual_time
async def test_worker_takes_its_partitions_up_again_when_nobody_ended_its_lease() -> None:
    crowd = Crowd(partitions=2, config=QUICK)
    kv = DeadKV(crowd.now)
    alone(crowd, kv)
    [manager] = await crowd.started(1)
    fence = manager.fence(Partition(("p", "00")))
    kv.is_dead = True
    await asyncio.sleep(7)
    assert manager.assignment.partitions == ()
    kv.is_dead = False
    await asyncio.sleep(5)
    assert len(manager.assignment.partitions) == 2
    assert manager.fence(Partition(("p", "00"))) == fence


@in_virtual_time
async def test_worker_that_let_go_while_its_renewal_was_under_way_takes_up_again() -> None:
    crowd = Crowd(partitions=2, config=QUICK)
    kv = DeadKV(crowd.now)
    alone(crowd, kv)
    [manager] = await crowd.started(1)
    assert manager._member is not None
    lease = manager._member.lease
    renewed = lease.stops_at
    await until(lambda: lease.stops_at > renewed)
    kv.is_dead = True
    await until(lambda: not manager.assignment.partitions)
    kv.is_dead = False  # a renewal that was sent before is answered now
    await asyncio.sleep(1)
    assert len(manager.assignment.partitions) == 2


@in_virtual_time
async def test_worker_that_was_fenced_comes_back_under_its_own_id_as_a_new_session() -> None:
    crowd = Crowd(partitions=2, config=QUICK)
    [manager] = await crowd.started(1)
    fence = manager.fence(Partition(("p", "00")))
    assert fence is not None
    entry = await crowd.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode(entry.value, WorkerRecord)
    assert record is not None
    stone = WorkerRecord(session=record.session, standing=Standing.ENDED)
    await crowd.kv.update(worker_key("worker-0"), encode(stone), entry.revision)
    await asyncio.sleep(2.5)
    assert State.CLAIMING_ID in [state for _, state in crowd.states[manager]][3:]
    await asyncio.sleep(10)
    assert manager.worker_id == "worker-0"
    assert manager.state is State.STABLE
    again = manager.fence(Partition(("p", "00")))
    assert again is not None
    assert again > fence
    assert crowd.calls[manager] == [(["p.00", "p.01"], []), ([], ["p.00", "p.01"]), (["p.00", "p.01"], [])]


@in_virtual_time
async def test_polling_alone_is_enough() -> None:
    crowd = Crowd(config=QUICK)
    alone(crowd, SilentKV(crowd.now))
    managers = await crowd.started(3)
    await asyncio.sleep(10)
    assert sorted(map(len, held(managers).values())) == [4, 4, 4]


@in_virtual_time
async def test_any_election_agent_will_do() -> None:
    class Appointed:
        def __init__(self, leads: bool) -> None:
            self.leads = leads

        async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
            return self.leads

        async def renew_leadership(self) -> None: ...

        async def release_leadership(self) -> None: ...

        async def is_leader(self) -> bool:
            return self.leads

    crowd = Crowd(config=QUICK)
    agents = [Appointed(True), Appointed(False)]
    managers = [crowd.manager(election=agent) for agent in agents]
    await asyncio.gather(*(manager.start() for manager in managers))
    assert [manager.is_leader for manager in managers] == [True, False]
    assert sorted(map(len, held(managers).values())) == [6, 6]


@in_virtual_time
async def test_two_that_are_both_told_to_lead_take_turns_and_do_no_harm() -> None:
    class Appointed:
        async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
            return True

        async def renew_leadership(self) -> None: ...

        async def release_leadership(self) -> None: ...

        async def is_leader(self) -> bool:
            return True

    crowd = Crowd(config=QUICK)
    managers = [crowd.manager(election=Appointed()) for _ in range(2)]
    await asyncio.gather(*(manager.start() for manager in managers))
    for _ in range(100):
        await asyncio.sleep(0.1)
        everything = [p for ps in held(managers).values() for p in ps]
        assert len(everything) == len(set(everything))
    assert sorted(map(len, held(managers).values())) == [6, 6]
