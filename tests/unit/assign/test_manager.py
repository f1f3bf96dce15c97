"""A manager as its user sees it: starting, stopping, failing or hanging hooks, lost leases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from heapline.assign.assignment import ASSIGNMENT_KEY, Assignment
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
from heapline.assign.kv import Entry, MemoryKV, decode_record, encode_record
from heapline.assign.manager import Manager
from heapline.assign.partitions import Partition
from heapline.assign.states import State
from heapline.assign.worker_ids import Standing, WorkerRecord, worker_key
from tests.unit.assign.pool_rig import Pool, crash, held, in_virtual_time, until

QUICK = Config(
    worker_id_max=3,
    cold_start_window=2.0,
    planned_scale_window=1.0,
    retry=RetryConfig(initial_delay=1.0, max_delay=4.0),
)


class DeadKV(MemoryKV):
    """A store that answers nothing while `is_dead`."""

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
    """A store whose watchers receive nothing."""

    async def watch(self, prefix: str) -> AsyncGenerator[Entry | None, None]:
        await asyncio.Event().wait()
        yield None


def alone(pool: Pool, kv: MemoryKV) -> None:
    pool.kv = kv


# --- starting


def test_unstarted_manager_is_in_init() -> None:
    pool = Pool()

    @in_virtual_time
    async def scenario() -> None:
        manager = pool.manager()
        assert (manager.worker_id, manager.is_leader, manager.state) == ("", False, State.INIT)
        assert manager.assignment == Assignment()
        assert not manager.holds(Partition(("p", "00")))
        assert manager.fence(Partition(("p", "00"))) is None
        with pytest.raises(ConnectionLost):
            await manager.refresh_partitions()

    scenario()


@in_virtual_time
async def test_started_manager_holds_the_partitions_passed_to_its_hook() -> None:
    pool = Pool(partitions=3, config=QUICK)
    [manager] = await pool.started(1)
    assert (manager.worker_id, manager.is_leader, manager.state) == ("worker-0", True, State.STABLE)
    assert pool.calls[manager] == [(["p.00", "p.01", "p.02"], [])]
    first = Partition(("p", "00"))
    assert manager.holds(first)
    assert manager.fence(first) == manager.assignment.fence(first) == manager.assignment.version


@in_virtual_time
async def test_manager_can_be_started_only_once() -> None:
    pool = Pool(config=QUICK)
    [manager] = await pool.started(1)
    with pytest.raises(BadConfig):
        await manager.start()


@in_virtual_time
async def test_start_fails_at_once_if_live_workers_hold_all_ids() -> None:
    pool = Pool(config=QUICK)
    await pool.started(4)
    began = pool.now()
    with pytest.raises(StableIDExhausted):
        await pool.manager().start()
    assert pool.now() == began


@in_virtual_time
async def test_start_waits_for_the_id_of_a_crashed_worker() -> None:
    pool = Pool(config=replace(QUICK, worker_id_max=1, worker_id_ttl=10.0))
    first, second = await pool.started(2)
    crash(second if first.is_leader else first)
    survivor = first if first.is_leader else second
    await asyncio.sleep(7)  # the leader has ended its session
    late = pool.manager()
    await late.start()
    assert {late.worker_id, survivor.worker_id} == {"worker-0", "worker-1"}


@in_virtual_time
async def test_start_fails_if_no_id_was_released_within_startup_timeout() -> None:
    pool = Pool(config=replace(QUICK, worker_id_max=0, worker_id_ttl=3600.0))
    await pool.kv.create(worker_key("worker-0"), encode_record(WorkerRecord(session="x", standing=Standing.ENDED)))
    with pytest.raises(StableIDExhausted):
        await pool.manager().start()
    assert pool.now() == pytest.approx(30, abs=2.1)


class FailingKV(MemoryKV):
    """A store that fails whenever workers are listed."""

    listings = 0

    async def entries(self, prefix: str) -> list[Entry]:
        self.listings += 1
        raise ConnectionLost("no route")


@pytest.mark.parametrize(("max_retries", "seconds"), [(0, 0.0), (1, 1.0), (3, 1.0 + 2.0 + 4.0)])
def test_claim_is_retried_as_configured(max_retries: int, seconds: float) -> None:
    @in_virtual_time
    async def scenario() -> None:
        retry = RetryConfig(max_retries=max_retries, initial_delay=1.0, max_delay=30.0)
        pool = Pool(config=replace(QUICK, retry=retry))
        kv = FailingKV(pool.now)
        with pytest.raises(ConnectionLost, match="no route"):
            await pool.manager(kv=kv).start()
        assert (kv.listings, pool.now()) == (max_retries + 1, pytest.approx(seconds))

    scenario()


@in_virtual_time
async def test_each_store_operation_has_operation_timeout() -> None:
    pool = Pool(config=replace(QUICK, operation_timeout=0.5, retry=RetryConfig(max_retries=1)))
    kv = DeadKV(pool.now)
    kv.is_dead = True
    with pytest.raises(ConnectionLost, match=r"no answer within 0\.5 s"):
        await pool.manager(kv=kv).start()
    assert pool.now() == pytest.approx(0.5 + 1.0 + 0.5, abs=0.1)


@pytest.mark.parametrize("failures", [2, 3])
def test_partitions_are_listed_again_as_configured(failures: int) -> None:
    class Shaky:
        fails = 0
        listings = 0

        async def list_partitions(self) -> list[Partition]:
            self.listings += 1
            if self.fails:
                self.fails -= 1
                raise OSError("no database")
            return [Partition(("p", "00"))]

    @in_virtual_time
    async def scenario() -> None:
        source, pool = Shaky(), Pool(config=replace(QUICK, retry=RetryConfig(max_retries=2)))
        manager = Manager(pool.config, pool.kv, source, clock=pool.now)
        await manager.start()
        before, began, source.fails = source.listings, pool.now(), failures
        if failures == 3:
            with pytest.raises(OSError, match="no database"):
                await manager.refresh_partitions()
        else:
            await manager.refresh_partitions()
        assert source.listings == before + 3
        assert pool.now() - began == pytest.approx(1.0 + 2.0)
        await manager.stop()

    scenario()


class Agent:
    """An election agent that appoints whom the test says, and may hang."""

    appoints, hangs = True, ""

    async def _wait(self, call: str) -> None:
        if self.hangs == call:
            await asyncio.Event().wait()

    async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
        await self._wait("request")
        return self.appoints

    async def renew_leadership(self) -> None:
        await self._wait("renew")

    async def release_leadership(self) -> None:
        await self._wait("release")

    async def is_leader(self) -> bool:
        await self._wait("is_leader")
        return self.appoints


@in_virtual_time
async def test_worker_stops_leading_when_its_election_agent_denies_it() -> None:
    agents = [Agent(), Agent()]
    agents[1].appoints = False
    pool = Pool(config=QUICK)
    managers = [pool.manager(election=agent) for agent in agents]
    await asyncio.gather(*(manager.start() for manager in managers))
    assert [manager.is_leader for manager in managers] == [True, False]
    agents[0].appoints, agents[1].appoints = False, True
    await asyncio.sleep(QUICK.heartbeat_interval + 0.1)
    assert not managers[0].is_leader
    await until(lambda: managers[1].is_leader)
    assert any(isinstance(error, ElectionFailed) for error in pool.errors)


@pytest.mark.parametrize("call", ["request", "renew", "release", "is_leader"])
def test_each_call_of_an_election_agent_has_election_timeout(call: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        agent, pool = Agent(), Pool(config=replace(QUICK, election_timeout=0.25))
        manager = pool.manager(election=agent)
        if call == "request":
            agent.hangs = call
            with pytest.raises(ElectionFailed, match=r"0\.25 s"):
                await manager.start()
            return
        await manager.start()
        agent.hangs, began = call, pool.now()
        if call == "release":
            await manager.stop()
            assert pool.now() - began < 0.5
        else:
            await until(lambda: any("0.25 s" in str(error) for error in pool.errors))
            assert pool.now() - began < QUICK.heartbeat_interval + 0.5
            await until(lambda: not manager.is_leader)  # it was not extended
            assert pool.now() - began < QUICK.heartbeat_ttl + 0.1

    scenario()


@in_virtual_time
async def test_start_fails_within_startup_timeout_if_the_store_is_silent() -> None:
    pool = Pool(config=QUICK)
    kv = DeadKV(pool.now)
    kv.is_dead = True
    with pytest.raises(ConnectionLost):
        await pool.manager(kv=kv).start()
    assert pool.now() == pytest.approx(30, abs=2.1)


@in_virtual_time
async def test_start_fails_if_the_election_does_not_answer() -> None:
    class Undecided(KVElection):
        async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
            await asyncio.Event().wait()
            return False

    pool = Pool(config=QUICK)
    with pytest.raises(ElectionFailed):
        await pool.manager(election=Undecided(pool.kv, pool.now)).start()


@in_virtual_time
async def test_failing_source_makes_start_fail_and_release_the_id() -> None:
    class Broken:
        async def list_partitions(self) -> list[Partition]:
            raise OSError("no database")

    pool = Pool(config=QUICK)
    manager = Manager(QUICK, pool.kv, Broken(), clock=pool.now)
    with pytest.raises(StartupTimeout):
        await manager.start()
    assert manager.state is State.SHUTDOWN
    entry = await pool.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode_record(entry.value, WorkerRecord)
    assert record is not None
    assert record.standing is Standing.RELEASED


@in_virtual_time
async def test_strategy_that_omits_partitions_changes_nothing() -> None:
    class Forgetful:
        def assign(self, workers: Sequence[str], partitions: Sequence[Partition], previous: object = None) -> dict:  # type: ignore[type-arg]
            return {workers[0]: list(partitions)[1:]}

    pool = Pool(config=QUICK)
    with pytest.raises(StartupTimeout):
        await pool.manager(strategy=Forgetful()).start()
    assert any(isinstance(error, BadStrategy) for error in pool.errors)


# --- stopping


@in_virtual_time
async def test_stop_drops_through_the_hook_then_releases_id_and_leadership() -> None:
    pool = Pool(partitions=2, config=QUICK)
    [manager] = await pool.started(1)
    await manager.stop()
    assert pool.calls[manager] == [(["p.00", "p.01"], []), ([], ["p.00", "p.01"])]
    assert manager.state is State.SHUTDOWN
    assert not manager.is_leader
    assert manager.assignment.partitions == ()
    began = pool.now()
    [again] = await pool.started(1)
    assert again.worker_id == "worker-0"
    assert again.is_leader
    assert pool.now() - began < 1
    await manager.stop()  # does nothing


@in_virtual_time
async def test_hanging_hook_makes_stop_time_out_and_release_nothing() -> None:
    pool = Pool(partitions=2, config=QUICK)
    hangs = asyncio.Event()

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        if removed:
            await hangs.wait()

    manager = pool.manager(hook=hook)
    await manager.start()
    began = pool.now()
    with pytest.raises(ShutdownTimeout) as caught:
        await manager.stop()
    assert pool.now() - began == pytest.approx(10, abs=0.1)
    assert caught.value.undropped == 2
    entry = await pool.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode_record(entry.value, WorkerRecord)
    assert record is not None
    assert record.standing is Standing.LIVE


@in_virtual_time
async def test_stop_takes_a_timeout_in_place_of_shutdown_timeout() -> None:
    async def hang(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        if removed:
            await asyncio.Event().wait()

    for timeout, seconds in ((0.5, 0.5), ("1500ms", 1.5), (None, QUICK.shutdown_timeout)):
        pool = Pool(config=QUICK)
        manager = pool.manager(hook=hang)
        await manager.start()
        with pytest.raises(BadConfig):
            await manager.stop(timeout="soon")
        began = pool.now()
        with pytest.raises(ShutdownTimeout, match=f"within {seconds:g} s"):
            await manager.stop(timeout=timeout)
        # The hook's task is then cancelled, which takes no time here.
        assert pool.now() - began == pytest.approx(seconds, abs=0.1)


@in_virtual_time
async def test_unstarted_manager_can_stop() -> None:
    pool = Pool(config=QUICK)
    manager = pool.manager()
    await manager.stop()
    assert manager.state is State.SHUTDOWN
    with pytest.raises(BadConfig):
        await manager.start()


@in_virtual_time
async def test_deleted_document_is_reported_and_nothing_is_granted() -> None:
    pool = Pool(partitions=4, config=QUICK)
    [first] = await pool.started(1)
    entry = await pool.kv.get(ASSIGNMENT_KEY)
    assert entry is not None
    await pool.kv.delete(ASSIGNMENT_KEY, entry.revision)
    second = pool.manager()
    with pytest.raises(StartupTimeout):
        await second.start()
    assert len(first.assignment.partitions) == 4
    assert any(isinstance(error, AssignmentVersionMismatch) for error in pool.errors)


# --- hooks


@in_virtual_time
async def test_hanging_hook_does_not_block_heartbeats() -> None:
    pool = Pool(partitions=2, config=QUICK)

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        await asyncio.sleep(25)

    manager = pool.manager(hook=hook)
    starting = asyncio.create_task(manager.start())
    for _ in range(20):
        await asyncio.sleep(1)
        entry = await pool.kv.get(worker_key("worker-0"))
        assert entry is not None
    record = decode_record(entry.value, WorkerRecord)
    assert record is not None
    assert record.beats >= 9
    await starting
    assert len(manager.assignment.partitions) == 2


@in_virtual_time
async def test_failing_removal_is_repeated_and_confirmed_only_on_success() -> None:
    pool = Pool(partitions=4, config=QUICK)
    tries: list[float] = []

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        if removed:
            tries.append(pool.now())
            if len(tries) < 6:
                raise OSError("the disk is busy")

    first = pool.manager(hook=hook)
    await first.start()
    [second] = await pool.started(1)
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
    assert any(isinstance(error, OSError) for error in pool.errors)


@in_virtual_time
async def test_hooks_never_run_concurrently() -> None:
    pool = Pool(config=QUICK)
    running = calls = 0

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        nonlocal running, calls
        running, calls = running + 1, calls + 1
        assert running == 1
        await asyncio.sleep(3)
        running -= 1

    manager = pool.manager(hook=hook)
    await manager.start()
    await pool.started(1)
    pool.source.replace((await pool.source.list_partitions())[2:])
    await manager.refresh_partitions()
    await asyncio.sleep(1.5)
    await manager.stop()
    assert calls >= 3
    assert not any(isinstance(error, AssertionError) for error in pool.errors)


@in_virtual_time
async def test_other_hooks_that_raise_affect_nothing() -> None:
    async def fails(*arguments: object) -> None:
        raise RuntimeError("the user's fault")

    pool = Pool(partitions=1, config=QUICK)
    manager = Manager(QUICK, pool.kv, pool.source, clock=pool.now, hooks=Hooks(on_state_changed=fails, on_error=fails))
    await manager.start()
    await asyncio.sleep(5)
    assert manager.state is State.STABLE


async def test_plain_function_hook_runs_in_a_thread() -> None:
    """In real time, because a blocking function must not block the event loop."""
    reported: list[tuple[int, bool]] = []
    here = threading.current_thread()

    def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        reported.append((len(added) - len(removed), threading.current_thread() is here))

    pool = Pool(partitions=2)
    config = Config(cold_start_window=0.0, heartbeat_interval=0.05, heartbeat_ttl=5.0)
    manager = Manager(config, MemoryKV(), pool.source, hooks=Hooks(on_assignment_changed=hook))
    await manager.start()
    await manager.stop()
    assert reported == [(2, False), (-2, False)]


# --- leases


@in_virtual_time
async def test_worker_that_cannot_renew_drops_before_a_leader_can_end_its_lease() -> None:
    pool = Pool(partitions=2, config=QUICK)
    kv = DeadKV(pool.now)
    alone(pool, kv)
    [manager] = await pool.started(1)
    await asyncio.sleep(10)
    kv.is_dead = True
    cut_at = pool.now()
    await until(lambda: not manager.assignment.partitions)
    assert 3.0 <= pool.now() - cut_at <= 5.1  # 5/6 of 6 s after a renewal that was at most 2 s old
    assert pool.calls[manager][-1] == ([], ["p.00", "p.01"])


@in_virtual_time
async def test_worker_with_a_hanging_hook_holds_nothing_after_its_lease() -> None:
    pool = Pool(partitions=2, config=QUICK)
    kv = DeadKV(pool.now)
    alone(pool, kv)
    stuck = asyncio.Event()

    async def hook(added: Sequence[Partition], removed: Sequence[Partition]) -> None:
        if removed:
            await stuck.wait()

    manager = pool.manager(hook=hook)
    await manager.start()
    kv.is_dead = True
    await asyncio.sleep(5.8)
    assert not manager.holds(Partition(("p", "00")))
    assert manager.fence(Partition(("p", "00"))) is None


@in_virtual_time
async def test_worker_resumes_its_partitions_if_its_lease_was_not_ended() -> None:
    pool = Pool(partitions=2, config=QUICK)
    kv = DeadKV(pool.now)
    alone(pool, kv)
    [manager] = await pool.started(1)
    fence = manager.fence(Partition(("p", "00")))
    kv.is_dead = True
    await asyncio.sleep(7)
    assert manager.assignment.partitions == ()
    kv.is_dead = False
    await asyncio.sleep(5)
    assert len(manager.assignment.partitions) == 2
    assert manager.fence(Partition(("p", "00"))) == fence


@in_virtual_time
async def test_worker_that_dropped_during_a_renewal_resumes() -> None:
    pool = Pool(partitions=2, config=QUICK)
    kv = DeadKV(pool.now)
    alone(pool, kv)
    [manager] = await pool.started(1)
    assert manager._member is not None
    lease = manager._member.lease
    renewed = lease.stops_at
    await until(lambda: lease.stops_at > renewed)
    kv.is_dead = True
    await until(lambda: not manager.assignment.partitions)
    kv.is_dead = False  # the earlier renewal is answered now
    await asyncio.sleep(1)
    assert len(manager.assignment.partitions) == 2


@in_virtual_time
async def test_fenced_worker_returns_under_its_id_as_a_new_session() -> None:
    pool = Pool(partitions=2, config=QUICK)
    [manager] = await pool.started(1)
    fence = manager.fence(Partition(("p", "00")))
    assert fence is not None
    entry = await pool.kv.get(worker_key("worker-0"))
    assert entry is not None
    record = decode_record(entry.value, WorkerRecord)
    assert record is not None
    stone = WorkerRecord(session=record.session, standing=Standing.ENDED)
    await pool.kv.update(worker_key("worker-0"), encode_record(stone), entry.revision)
    await asyncio.sleep(2.5)
    assert State.CLAIMING_ID in [state for _, state in pool.states[manager]][3:]
    await asyncio.sleep(10)
    assert manager.worker_id == "worker-0"
    assert manager.state is State.STABLE
    again = manager.fence(Partition(("p", "00")))
    assert again is not None
    assert again > fence
    assert pool.calls[manager] == [(["p.00", "p.01"], []), ([], ["p.00", "p.01"]), (["p.00", "p.01"], [])]


@in_virtual_time
async def test_polling_alone_is_enough() -> None:
    pool = Pool(config=QUICK)
    alone(pool, SilentKV(pool.now))
    managers = await pool.started(3)
    await asyncio.sleep(10)
    assert sorted(map(len, held(managers).values())) == [4, 4, 4]


@in_virtual_time
async def test_any_election_agent_works() -> None:
    class Appointed:
        def __init__(self, leads: bool) -> None:
            self.leads = leads

        async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
            return self.leads

        async def renew_leadership(self) -> None: ...

        async def release_leadership(self) -> None: ...

        async def is_leader(self) -> bool:
            return self.leads

    pool = Pool(config=QUICK)
    agents = [Appointed(True), Appointed(False)]
    managers = [pool.manager(election=agent) for agent in agents]
    await asyncio.gather(*(manager.start() for manager in managers))
    assert [manager.is_leader for manager in managers] == [True, False]
    assert sorted(map(len, held(managers).values())) == [6, 6]


@in_virtual_time
async def test_two_simultaneous_leaders_do_no_harm() -> None:
    class Appointed:
        async def request_leadership(self, worker_id: str, lease_duration: float) -> bool:
            return True

        async def renew_leadership(self) -> None: ...

        async def release_leadership(self) -> None: ...

        async def is_leader(self) -> bool:
            return True

    pool = Pool(config=QUICK)
    managers = [pool.manager(election=Appointed()) for _ in range(2)]
    await asyncio.gather(*(manager.start() for manager in managers))
    for _ in range(100):
        await asyncio.sleep(0.1)
        everything = [p for ps in held(managers).values() for p in ps]
        assert len(everything) == len(set(everything))
    assert sorted(map(len, held(managers).values())) == [6, 6]
