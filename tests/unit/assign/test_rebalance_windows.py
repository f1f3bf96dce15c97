"""Windows, cooldown and threshold with the specified values, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from heapline.assign.assignment import Lifecycle
from heapline.assign.config import AssignmentConfig, Config
from heapline.assign.manager import Manager
from heapline.assign.partitions import Partition
from heapline.assign.states import State
from tests.unit.assign.pool_rig import Pool, crash, held, holder_by_partition, in_virtual_time

#: The specification's defaults, and enough time for a start that waits through the cold start window.
PATIENT = Config(startup_timeout=60.0)


@in_virtual_time
async def test_cold_start_waits_for_its_window_and_assigns_to_all_workers() -> None:
    pool = Pool(config=PATIENT)
    early = asyncio.create_task(pool.started(1))
    await asyncio.sleep(20)
    late = asyncio.create_task(pool.started(3))
    managers = [*await early, *await late]
    assert 30 <= pool.now() < 31
    assert sorted(map(len, held(managers).values())) == [3, 3, 3, 3]
    assert await pool.lifecycle() is Lifecycle.POST_COLD_START
    leader = pool.leader(managers)
    names = [state.name for _, state in pool.states[leader]]
    assert names[:6] == [
        "CLAIMING_ID",
        "ELECTION",
        "WAITING_ASSIGNMENT",
        "SCALING",
        "REBALANCING",
        "WAITING_ASSIGNMENT",
    ]
    assert names[-1] == "STABLE"


@in_virtual_time
async def test_cold_start_window_never_makes_start_fail() -> None:
    pool = Pool()  # window and startup_timeout are both 30 s
    await pool.started(2)
    assert 24 <= pool.now() < 25


@in_virtual_time
async def test_followers_go_from_waiting_to_stable() -> None:
    pool = Pool()
    managers = await pool.started(2)
    [follower] = [manager for manager in managers if not manager.is_leader]
    names = [state.name for _, state in pool.states[follower]]
    assert names == ["CLAIMING_ID", "ELECTION", "WAITING_ASSIGNMENT", "STABLE"]


@in_virtual_time
async def test_joining_worker_is_included_after_the_planned_scale_window() -> None:
    pool = Pool()
    managers = await pool.started(2)
    await asyncio.sleep(60)
    began = pool.now()
    managers += await pool.started(1)
    assert 10 <= pool.now() - began < 11
    await asyncio.sleep(1)
    assert sorted(map(len, held(managers).values())) == [4, 4, 4]
    assert await pool.lifecycle() is Lifecycle.STABLE
    assert 10 <= pool.seconds_in(pool.leader(managers), State.SCALING)[-1] < 11


@in_virtual_time
async def test_stopped_worker_keeps_its_slot_for_the_planned_scale_window() -> None:
    pool = Pool()
    managers = await pool.started(3)
    await asyncio.sleep(60)
    before = held(managers)
    [gone] = [m for m in managers if m.worker_id == "worker-2"]
    await gone.stop()
    managers.remove(gone)
    await asyncio.sleep(9)
    assert held(managers) == {worker: ps for worker, ps in before.items() if worker != "worker-2"}
    await asyncio.sleep(2)
    assert sorted(map(len, held(managers).values())) == [6, 6]


@in_virtual_time
async def test_restarted_worker_immediately_gets_its_id_and_partitions_again() -> None:
    pool = Pool()
    managers = await pool.started(3)
    await asyncio.sleep(60)
    before = held(managers)
    [gone] = [m for m in managers if m.worker_id == "worker-1"]
    await gone.stop()
    await asyncio.sleep(3)
    began = pool.now()
    managers.remove(gone)
    managers += await pool.started(1)
    assert pool.now() - began < 1
    assert held(managers) == before


@in_virtual_time
async def test_rolling_restart_keeps_every_partition_in_place() -> None:
    pool = Pool(partitions=40)
    managers = await pool.started(5)
    await asyncio.sleep(30)
    before = held(managers)
    for manager in list(managers):
        await manager.stop()
        await asyncio.sleep(2)
        managers.remove(manager)
        managers += await pool.started(1)
    assert held(managers) == before


@in_virtual_time
async def test_crash_is_an_emergency_that_waits_only_for_the_lease() -> None:
    pool = Pool()
    managers = await pool.started(3)
    await asyncio.sleep(60)
    leader = pool.leader(managers)
    victim = next(m for m in managers if m is not leader)
    crash(victim)
    managers.remove(victim)
    ended = pool.now() + 6 + 2  # its last renewal may be one interval old
    while sum(map(len, held(managers).values())) < 12:
        await asyncio.sleep(0.05)
        assert pool.now() < ended + 1
    assert State.EMERGENCY in [state for _, state in pool.states[leader]]


@in_virtual_time
async def test_crash_does_not_wait_for_the_cooldown() -> None:
    pool = Pool(config=Config(assignment=AssignmentConfig(rebalance_cooldown=600.0)))
    managers = await pool.started(3)
    victim = next(m for m in managers if not m.is_leader)
    crash(victim)
    managers.remove(victim)
    await asyncio.sleep(10)
    assert sum(map(len, held(managers).values())) == 12


@in_virtual_time
async def test_planned_change_waits_for_the_cooldown() -> None:
    pool = Pool(config=Config(startup_timeout=60.0, assignment=AssignmentConfig(rebalance_cooldown=25.0)))
    managers = await pool.started(1)
    planned_at = pool.now()
    managers += await pool.started(1)
    assert 25 <= pool.now() - planned_at < 26


@in_virtual_time
async def test_cooldown_never_makes_start_fail() -> None:
    pool = Pool(config=Config(assignment=AssignmentConfig(rebalance_cooldown=300.0)))
    await pool.started(2)
    began = pool.now()
    await pool.started(1)
    assert 20 < pool.now() - began < 30


@in_virtual_time
async def test_crash_of_the_whole_pool_never_makes_the_next_start_fail() -> None:
    """Leadership and the leader's partitions end after one lease, the other partitions after a second one."""
    pool = Pool()
    managers = await pool.started(3)
    await asyncio.sleep(20)
    for manager in managers:
        crash(manager)
    again = await pool.started(3)
    await asyncio.sleep(7)
    assert [len(ps) for ps in held(again).values()] == [4, 4, 4]


@in_virtual_time
async def test_pool_restart_is_detected_and_gets_the_cold_start_window() -> None:
    pool = Pool(config=PATIENT)
    managers = await pool.started(4)
    await asyncio.sleep(60)
    for manager in managers:
        await manager.stop()
    await asyncio.sleep(5)
    began = pool.now()
    first = await pool.started(1)  # its own slot exists, so it need not wait
    assert pool.now() - began < 1
    assert await pool.lifecycle() is Lifecycle.COLD_START
    await asyncio.sleep(20)
    assert [len(ps) for ps in held(first).values()] == [3]  # the others' slots are kept: they are starting
    await asyncio.sleep(11)
    assert [len(ps) for ps in held(first).values()] == [12]
    assert await pool.lifecycle() is Lifecycle.POST_COLD_START


@in_virtual_time
async def test_restart_in_which_all_workers_return_moves_nothing() -> None:
    pool = Pool(config=PATIENT)
    managers = await pool.started(4)
    await asyncio.sleep(60)
    before = held(managers)
    for manager in managers:
        await manager.stop()
    again = [(await pool.started(1))[0] for _ in range(4)]
    assert held(again) == before
    await asyncio.sleep(1)
    assert await pool.lifecycle() is Lifecycle.POST_COLD_START


@in_virtual_time
async def test_loss_of_half_the_workers_is_not_a_restart() -> None:
    pool = Pool()
    managers = await pool.started(2)
    victim = next(m for m in managers if not m.is_leader)
    crash(victim)
    managers.remove(victim)
    await asyncio.sleep(10)
    assert [len(ps) for ps in held(managers).values()] == [12]


@in_virtual_time
async def test_new_partitions_are_assigned_after_the_planned_scale_window() -> None:
    pool = Pool()
    managers = await pool.started(2)
    await asyncio.sleep(30)
    follower = next(m for m in managers if not m.is_leader)
    pool.source.replace([*await pool.source.list_partitions(), Partition(("q", "new"))])
    await follower.refresh_partitions()
    await asyncio.sleep(9)
    assert sum(map(len, held(managers).values())) == 12
    await asyncio.sleep(3)
    assert sum(map(len, held(managers).values())) == 13


@in_virtual_time
async def test_removed_partition_is_dropped() -> None:
    pool = Pool()
    managers = await pool.started(2)
    await asyncio.sleep(30)
    pool.source.replace((await pool.source.list_partitions())[1:])
    await pool.leader(managers).refresh_partitions()
    await asyncio.sleep(12)
    assert sum(map(len, held(managers).values())) == 11
    assert len((await pool.document()).ids) == 11


@pytest.mark.parametrize(("threshold", "moves"), [(0.15, False), (0.0, True)])
def test_changed_weights_move_nothing_below_the_threshold(threshold: float, moves: bool) -> None:
    @in_virtual_time
    async def scenario() -> None:
        policy = AssignmentConfig(min_rebalance_threshold=threshold)
        pool = Pool(partitions=100, config=Config(assignment=policy))
        managers = await pool.started(2)
        await asyncio.sleep(30)
        before = held(managers)
        heavy = set(next(iter(before.values()))[:10])
        listed = await pool.source.list_partitions()
        pool.source.replace([Partition(p.keys, 7 if p.id in heavy else 1) for p in listed])
        await pool.leader(managers).refresh_partitions()
        await asyncio.sleep(13)
        assert (held(managers) != before) is moves
        assert sum((await pool.document()).weights) == 160  # the weights are updated in any case

    scenario()


@in_virtual_time
async def test_more_workers_than_partitions_all_start() -> None:
    pool = Pool(partitions=2)
    managers = await pool.started(4)
    assert sorted(map(len, held(managers).values())) == [0, 0, 1, 1]


@in_virtual_time
async def test_stopping_leader_is_succeeded_immediately_and_nothing_moves() -> None:
    pool = Pool()
    managers = await pool.started(3)
    await asyncio.sleep(30)
    leader = pool.leader(managers)
    epoch = (await pool.document()).epoch
    others = [m for m in managers if m is not leader]
    before = held(others)
    await leader.stop()
    await asyncio.sleep(1)
    assert pool.leader(others).is_leader
    assert held(others) == before
    assert (await pool.document()).epoch > epoch


@in_virtual_time
async def test_crashed_leader_is_succeeded_after_its_lease() -> None:
    pool = Pool()
    managers = await pool.started(3)
    await asyncio.sleep(30)
    leader = pool.leader(managers)
    crash(leader)
    others: list[Manager] = [m for m in managers if m is not leader]
    await asyncio.sleep(9)
    assert pool.leader(others).is_leader
    await asyncio.sleep(8)
    assert sum(map(len, held(others).values())) == 12


@in_virtual_time
async def test_crashed_leaders_partitions_do_not_wait_for_a_second_lease() -> None:
    pool = Pool()
    managers = await pool.started(3)
    await asyncio.sleep(30)
    leader = pool.leader(managers)
    crash(leader)
    others: list[Manager] = [m for m in managers if m is not leader]
    lease_over = pool.now() + 6
    while sum(map(len, held(others).values())) < 12:
        await asyncio.sleep(0.05)
        assert pool.now() < lease_over + 2 + 1  # the others poll every two seconds


@in_virtual_time
async def test_permanent_join_or_leave_moves_few_partitions() -> None:
    pool = Pool(partitions=160)
    managers = await pool.started(8)
    await asyncio.sleep(30)
    before = holder_by_partition(managers)
    managers += await pool.started(1)
    await asyncio.sleep(5)
    joined = holder_by_partition(managers)
    assert len(joined) == 160
    assert sum(joined[p] == worker for p, worker in before.items()) >= 0.85 * 160
    gone = next(manager for manager in managers if manager.worker_id == "worker-3")
    await gone.stop()
    await asyncio.sleep(20)
    left = holder_by_partition(managers)
    assert len(left) == 160
    kept = [p for p, worker in joined.items() if worker != "worker-3"]
    assert sum(left[p] == joined[p] for p in kept) >= 0.95 * len(kept)
