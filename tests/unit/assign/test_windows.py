"""Windows, cooldown and threshold, with the specification's numbers, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from heapline.assign.config import AssignmentConfig, Config
from heapline.assign.manager import Manager
from heapline.assign.model import Lifecycle, Partition, State
from tests.unit.assign.crowd_rig import Crowd, crash, held, in_virtual_time, places

#: The specification's defaults, and enough time for a start that waits through the cold start window.
PATIENT = Config(startup_timeout=60.0)


@in_virtual_time
async def test_cold_start_waits_for_its_window_and_assigns_to_all_who_came() -> None:
    crowd = Crowd(config=PATIENT)
    early = asyncio.create_task(crowd.started(1))
    await asyncio.sleep(20)
    late = asyncio.create_task(crowd.started(3))
    managers = [*await early, *await late]
    assert 30 <= crowd.now() < 31
    assert sorted(map(len, held(managers).values())) == [3, 3, 3, 3]
    assert await crowd.lifecycle() is Lifecycle.POST_COLD_START
    leader = crowd.leader(managers)
    names = [state.name for _, state in crowd.states[leader]]
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
    crowd = Crowd()  # window and startup_timeout are both 30 s
    await crowd.started(2)
    assert 24 <= crowd.now() < 25


@in_virtual_time
async def test_followers_go_from_waiting_to_stable() -> None:
    crowd = Crowd()
    managers = await crowd.started(2)
    [follower] = [manager for manager in managers if not manager.is_leader]
    names = [state.name for _, state in crowd.states[follower]]
    assert names == ["CLAIMING_ID", "ELECTION", "WAITING_ASSIGNMENT", "STABLE"]


@in_virtual_time
async def test_joining_worker_is_taken_in_after_the_planned_scale_window() -> None:
    crowd = Crowd()
    managers = await crowd.started(2)
    await asyncio.sleep(60)
    began = crowd.now()
    managers += await crowd.started(1)
    assert 10 <= crowd.now() - began < 11
    await asyncio.sleep(1)
    assert sorted(map(len, held(managers).values())) == [4, 4, 4]
    assert await crowd.lifecycle() is Lifecycle.STABLE
    assert 10 <= crowd.seconds_in(crowd.leader(managers), State.SCALING)[-1] < 11


@in_virtual_time
async def test_worker_that_stopped_keeps_its_place_for_the_planned_scale_window() -> None:
    crowd = Crowd()
    managers = await crowd.started(3)
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
async def test_restarted_worker_gets_its_id_and_its_partitions_again_at_once() -> None:
    crowd = Crowd()
    managers = await crowd.started(3)
    await asyncio.sleep(60)
    before = held(managers)
    [gone] = [m for m in managers if m.worker_id == "worker-1"]
    await gone.stop()
    await asyncio.sleep(3)
    began = crowd.now()
    managers.remove(gone)
    managers += await crowd.started(1)
    assert crowd.now() - began < 1
    assert held(managers) == before


@in_virtual_time
async def test_rolling_restart_keeps_every_partition_in_place() -> None:
    crowd = Crowd(partitions=40)
    managers = await crowd.started(5)
    await asyncio.sleep(30)
    before = held(managers)
    for manager in list(managers):
        await manager.stop()
        await asyncio.sleep(2)
        managers.remove(manager)
        managers += await crowd.started(1)
    assert held(managers) == before


@in_virtual_time
async def test_crash_is_an_emergency_that_waits_for_nothing_but_the_lease() -> None:
    crowd = Crowd()
    managers = await crowd.started(3)
    await asyncio.sleep(60)
    leader = crowd.leader(managers)
    victim = next(m for m in managers if m is not leader)
    crash(victim)
    managers.remove(victim)
    ended = crowd.now() + 6 + 2  # its last renewal may be as old as an interval
    while sum(map(len, held(managers).values())) < 12:
        await asyncio.sleep(0.05)
        assert crowd.now() < ended + 1
    assert State.EMERGENCY in [state for _, state in crowd.states[leader]]


@in_virtual_time
async def test_crash_does_not_wait_for_the_cooldown() -> None:
    crowd = Crowd(config=Config(assignment=AssignmentConfig(rebalance_cooldown=600.0)))
    managers = await crowd.started(3)
    victim = next(m for m in managers if not m.is_leader)
    crash(victim)
    managers.remove(victim)
    await asyncio.sleep(10)
    assert sum(map(len, held(managers).values())) == 12


@in_virtual_time
async def test_planned_change_waits_for_the_cooldown() -> None:
    crowd = Crowd(config=Config(startup_timeout=60.0, assignment=AssignmentConfig(rebalance_cooldown=25.0)))
    managers = await crowd.started(1)
    planned_at = crowd.now()
    managers += await crowd.started(1)
    assert 25 <= crowd.now() - planned_at < 26


@in_virtual_time
async def test_cooldown_never_makes_start_fail() -> None:
    crowd = Crowd(config=Config(assignment=AssignmentConfig(rebalance_cooldown=300.0)))
    await crowd.started(2)
    began = crowd.now()
    await crowd.started(1)
    assert 20 < crowd.now() - began < 30


@in_virtual_time
async def test_crash_of_the_whole_crowd_never_makes_the_next_start_fail() -> None:
    """The lead ends after a lease, with what the leader held; what the others held after another one."""
    crowd = Crowd()
    managers = await crowd.started(3)
    await asyncio.sleep(20)
    for manager in managers:
        crash(manager)
    again = await crowd.started(3)
    await asyncio.sleep(7)
    assert [len(ps) for ps in held(again).values()] == [4, 4, 4]


@in_virtual_time
async def test_restart_of_the_crowd_is_detected_and_given_the_cold_start_window() -> None:
    crowd = Crowd(config=PATIENT)
    managers = await crowd.started(4)
    await asyncio.sleep(60)
    for manager in managers:
        await manager.stop()
    await asyncio.sleep(5)
    began = crowd.now()
    first = await crowd.started(1)  # its own place is there, so it need not wait
    assert crowd.now() - began < 1
    assert await crowd.lifecycle() is Lifecycle.COLD_START
    await asyncio.sleep(20)
    assert [len(ps) for ps in held(first).values()] == [3]  # the others' places are kept: they are starting
    await asyncio.sleep(11)
    assert [len(ps) for ps in held(first).values()] == [12]
    assert await crowd.lifecycle() is Lifecycle.POST_COLD_START


@in_virtual_time
async def test_restart_that_brings_everybody_back_moves_nothing() -> None:
    crowd = Crowd(config=PATIENT)
    managers = await crowd.started(4)
    await asyncio.sleep(60)
    before = held(managers)
    for manager in managers:
        await manager.stop()
    again = [(await crowd.started(1))[0] for _ in range(4)]
    assert held(again) == before
    await asyncio.sleep(1)
    assert await crowd.lifecycle() is Lifecycle.POST_COLD_START


@in_virtual_time
async def test_loss_of_half_the_workers_is_no_restart() -> None:
    crowd = Crowd()
    managers = await crowd.started(2)
    victim = next(m for m in managers if not m.is_leader)
    crash(victim)
    managers.remove(victim)
    await asyncio.sleep(10)
    assert [len(ps) for ps in held(managers).values()] == [12]


@in_virtual_time
async def test_new_partitions_are_assigned_after_the_planned_scale_window() -> None:
    crowd = Crowd()
    managers = await crowd.started(2)
    await asyncio.sleep(30)
    follower = next(m for m in managers if not m.is_leader)
    crowd.source.replace([*await crowd.source.list_partitions(), Partition(("q", "new"))])
    await follower.refresh_partitions()
    await asyncio.sleep(9)
    assert sum(map(len, held(managers).values())) == 12
    await asyncio.sleep(3)
    assert sum(map(len, held(managers).values())) == 13


@in_virtual_time
async def test_partition_that_went_away_is_dropped() -> None:
    crowd = Crowd()
    managers = await crowd.started(2)
    await asyncio.sleep(30)
    crowd.source.replace((await crowd.source.list_partitions())[1:])
    await crowd.leader(managers).refresh_partitions()
    await asyncio.sleep(12)
    assert sum(map(len, held(managers).values())) == 11
    assert len((await crowd.document()).ids) == 11


@pytest.mark.parametrize(("threshold", "moves"), [(0.15, False), (0.0, True)])
def test_weights_that_changed_move_nothing_below_the_threshold(threshold: float, moves: bool) -> None:
    @in_virtual_time
    async def scenario() -> None:
        policy = AssignmentConfig(min_rebalance_threshold=threshold)
        crowd = Crowd(partitions=100, config=Config(assignment=policy))
        managers = await crowd.started(2)
        await asyncio.sleep(30)
        before = held(managers)
        heavy = set(next(iter(before.values()))[:10])
        listed = await crowd.source.list_partitions()
        crowd.source.replace([Partition(p.keys, 7 if p.id in heavy else 1) for p in listed])
        await crowd.leader(managers).refresh_partitions()
        await asyncio.sleep(13)
        assert (held(managers) != before) is moves
        assert sum((await crowd.document()).weights) == 160  # the weights are taken over in any case

    scenario()


@in_virtual_time
async def test_more_workers_than_partitions_all_start() -> None:
    crowd = Crowd(partitions=2)
    managers = await crowd.started(4)
    assert sorted(map(len, held(managers).values())) == [0, 0, 1, 1]


@in_virtual_time
async def test_leader_that_stops_is_followed_at_once_and_nothing_moves() -> None:
    crowd = Crowd()
    managers = await crowd.started(3)
    await asyncio.sleep(30)
    leader = crowd.leader(managers)
    epoch = (await crowd.document()).epoch
    others = [m for m in managers if m is not leader]
    before = held(others)
    await leader.stop()
    await asyncio.sleep(1)
    assert crowd.leader(others).is_leader
    assert held(others) == before
    assert (await crowd.document()).epoch > epoch


@in_virtual_time
async def test_leader_that_crashes_is_followed_after_its_lease() -> None:
    crowd = Crowd()
    managers = await crowd.started(3)
    await asyncio.sleep(30)
    leader = crowd.leader(managers)
    crash(leader)
    others: list[Manager] = [m for m in managers if m is not leader]
    await asyncio.sleep(9)
    assert crowd.leader(others).is_leader
    await asyncio.sleep(8)
    assert sum(map(len, held(others).values())) == 12


@in_virtual_time
async def test_what_a_crashed_leader_held_does_not_wait_for_a_second_lease() -> None:
    crowd = Crowd()
    managers = await crowd.started(3)
    await asyncio.sleep(30)
    leader = crowd.leader(managers)
    crash(leader)
    others: list[Manager] = [m for m in managers if m is not leader]
    lease_over = crowd.now() + 6
    while sum(map(len, held(others).values())) < 12:
        await asyncio.sleep(0.05)
        assert crowd.now() < lease_over + 2 + 1  # the others look at it every two seconds


@in_virtual_time
async def test_worker_that_joins_or_leaves_for_good_moves_few() -> None:
    crowd = Crowd(partitions=160)
    managers = await crowd.started(8)
    await asyncio.sleep(30)
    before = places(managers)
    managers += await crowd.started(1)
    await asyncio.sleep(5)
    joined = places(managers)
    assert len(joined) == 160
    assert sum(joined[p] == worker for p, worker in before.items()) >= 0.85 * 160
    gone = next(manager for manager in managers if manager.worker_id == "worker-3")
    await gone.stop()
    await asyncio.sleep(20)
    left = places(managers)
    assert len(left) == 160
    kept = [p for p, worker in joined.items() if worker != "worker-3"]
    assert sum(left[p] == joined[p] for p in kept) >= 0.95 * len(kept)
