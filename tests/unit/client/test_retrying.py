"""Repeats of calls: which ones, on which endpoint, for how long, and the final error. In virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.client.backoff import FIRST_PAUSE, LONGEST_PAUSE, pauses
from heapline.client.wrappers.retrying import RECONCILE, Retrying
from heapline.contract.admin import CreateKey, CreateLoginLink, CreateUser
from heapline.contract.batches import ForgetSink
from heapline.contract.call import CALLS, HERE, Command, Context, Repeat
from heapline.contract.columns import pack
from heapline.contract.dead_letters import DeleteDeadLetters, ReplayDeadLetters
from heapline.contract.errors import (
    BatchInDoubt,
    Closed,
    CorruptionError,
    DeadlineExceeded,
    HeaplineError,
    LeaseLost,
    MessageNotFound,
    ResourceExhausted,
    StorageFull,
    TopicNotFound,
    TopicReloading,
    Unauthenticated,
    UnavailableError,
)
from heapline.contract.groups import (
    EARLIEST,
    DeleteGroup,
    DeleteGroupDeadLetters,
    GroupNack,
    LostRows,
    PartitionRows,
    ReplayGroupDeadLetters,
    ResetOffsets,
)
from heapline.contract.inspection import EndLeases
from heapline.contract.leases import Ack, Bury, Extended, Leased, LeasedMessages, LeaseKeys, Nack, Pop, Release, Settled
from heapline.contract.message import MessageInfo
from heapline.contract.messages import Cancel
from heapline.contract.schedules import DeleteSchedule
from heapline.contract.topics import DeleteTopic, Purge, Stats
from tests.simulation.loop import run

LEASES = LeaseKeys(pack([1, 2]), pack([10, 20]))
ACK, STATS = Ack("jobs", LEASES), Stats("jobs")
ONCE: list[Command[Any]] = [
    Purge("jobs"),
    DeleteTopic("jobs"),
    ReplayDeadLetters("jobs"),
    DeleteDeadLetters("jobs", ids=[1]),
    DeleteSchedule("nightly"),
    ForgetSink("lake"),
    DeleteGroup("jobs", "g"),
    ResetOffsets("jobs", "g", EARLIEST),
    ReplayGroupDeadLetters("jobs", "g"),
    DeleteGroupDeadLetters("jobs", "g"),
    CreateKey("ci", ["jobs:produce"]),
    CreateUser("ada@example.org", "a long password", ["jobs:produce"]),
    CreateLoginLink(),
    EndLeases("jobs", [1]),
]


def unreached() -> UnavailableError:
    error = UnavailableError("failed to connect")
    error.reached = False
    return error


class FakeTransport:
    """A connection that answers from the test's script."""

    def __init__(self, world: World, endpoint: str) -> None:
        self.world, self.endpoint = world, endpoint
        self.closed = False

    async def do(self, command: Any, context: Context) -> Any:
        self.world.tries.append((self.endpoint, asyncio.get_running_loop().time()))
        self.world.commands.append(command)
        self.world.deadlines.append(context.deadline)
        await asyncio.sleep(0)
        answer = self.world.script.pop(0) if self.world.script else None
        if isinstance(answer, Exception):
            raise answer
        return "answer" if answer is None else answer

    async def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, *script: Any, endpoints: tuple[str, ...] = ("a:1",), deadline: float = 30.0):
        self.script = list(script)
        self.tries: list[tuple[str, float]] = []
        self.commands: list[Any] = []
        self.deadlines: list[Any] = []
        self.channels: list[FakeTransport] = []
        self.retrying = Retrying(endpoints, self._make, deadline)

    async def do(self, command: Any, context: Context = HERE) -> Any:
        return await self.retrying.do(command, context)

    def _make(self, endpoint: str) -> Any:
        self.channels.append(FakeTransport(self, endpoint))
        return self.channels[-1]

    @property
    def places(self) -> list[str]:
        return [place for place, _ in self.tries]


def test_backoff_doubles_up_to_its_maximum_with_jitter() -> None:
    found = [pause for pause, _ in zip(pauses(), range(12), strict=False)]
    for i, pause in enumerate(found):
        most = min(LONGEST_PAUSE, FIRST_PAUSE * 2**i)
        assert most / 2 <= pause <= most
    assert len(set(found)) == 12


@pytest.mark.parametrize("error", [UnavailableError("x"), TopicReloading("jobs", "x"), Closed(), unreached()])
def test_transient_errors_are_retried(error: HeaplineError) -> None:
    world = World(error, error)
    answer, doubt = run(world.retrying._try_until_deadline(ACK, HERE))
    assert answer == "answer"
    assert doubt is getattr(error, "reached", True)
    assert len(world.tries) == 3


@pytest.mark.parametrize(
    "error",
    [
        TopicNotFound("jobs"), LeaseLost([1], "jobs"), Unauthenticated("who?"), ResourceExhausted("backlog", 5),
        StorageFull(), BatchInDoubt("key 'k'", "b"), CorruptionError("bytes"), HeaplineError("internal"),
    ],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_final_errors_are_raised_immediately(error: HeaplineError) -> None:
    world = World(error)
    with pytest.raises(type(error)) as caught:
        run(world.do(ACK))
    assert caught.value is error
    assert not error.repeated
    assert len(world.tries) == 1


def test_error_after_a_try_that_may_have_run_says_so() -> None:
    error = LeaseLost([1], "jobs")
    with pytest.raises(LeaseLost):
        run(World(UnavailableError("cut"), error).do(ACK))
    assert error.repeated
    other = LeaseLost([1], "jobs")
    with pytest.raises(LeaseLost):
        run(World(unreached(), other).do(ACK))
    assert not other.repeated, "nothing had left"


def test_every_call_that_must_not_be_repeated_is_tested_here() -> None:
    assert {kind for kind in CALLS.values() if kind.facts.repeat is Repeat.ONCE} == set(map(type, ONCE))


@pytest.mark.parametrize("command", ONCE, ids=lambda c: type(c).__name__)
def test_non_repeatable_call_is_retried_only_before_it_was_sent(command: Any) -> None:
    assert run(World(unreached(), unreached()).do(command)) == "answer"
    world = World(unreached(), UnavailableError("cut"))
    with pytest.raises(UnavailableError) as caught:
        run(world.do(command))
    assert len(world.tries) == 2
    assert str(caught.value) == (
        f"{type(command).facts.rpc} was sent and no response arrived (cut), so it may have been executed. It is not "
        "repeated automatically, because a repeat would also affect what was added since; check, and call again if "
        "needed"
    )


def test_failed_channel_is_closed_and_the_next_endpoint_used() -> None:
    world = World(UnavailableError("1"), UnavailableError("2"), UnavailableError("3"), endpoints=("a:1", "b:1"))

    async def go() -> None:
        await world.do(STATS)
        await world.do(STATS)
        await asyncio.sleep(1)

    run(go())
    assert world.places == ["a:1", "b:1", "a:1", "b:1", "b:1"]
    assert [c.closed for c in world.channels] == [True, True, True, False]


@pytest.mark.parametrize(
    ("endpoints", "event"),
    [
        (("a:1",), "connection failed; reconnecting"),
        (("a:1", "b:1"), "connection failed; trying the next endpoint"),
    ],
)
def test_failed_connection_is_logged_with_what_happens_next(
    endpoints: tuple[str, ...], event: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="heapline"):
        run(World(UnavailableError("cut"), endpoints=endpoints).do(STATS))
    assert caplog.messages == [f"{event} endpoint='a:1' error='cut'"]


def test_reloading_topic_does_not_change_the_endpoint() -> None:
    world = World(TopicReloading("jobs", "x"), endpoints=("a:1", "b:1"))
    run(world.do(STATS))
    assert world.places == ["a:1", "a:1"]
    assert len(world.channels) == 1


def test_deadline_without_a_connection_says_that_nothing_was_changed() -> None:
    world = World(*(unreached() for _ in range(1000)), endpoints=("a:1", "b:1"))

    async def go() -> float:
        with pytest.raises(DeadlineExceeded) as caught:
            await world.do(STATS)
        assert str(caught.value) == (
            "Stats failed after 30 s: could not connect to a:1, b:1, so nothing changed; "
            "check that `heapline serve` is running there (last error: failed to connect)"
        )
        assert not caught.value.reached
        return asyncio.get_running_loop().time()

    assert 25 < run(go()) <= 30
    assert 12 < len(world.tries) < 60


def test_deadline_in_doubt_says_the_call_may_have_been_applied() -> None:
    world = World(*(UnavailableError("cut off") for _ in range(100)), deadline=3.0)
    with pytest.raises(
        DeadlineExceeded, match=r"after 3 s: it was sent .* may have been executed \(last error: cut"
    ) as caught:
        run(world.do(STATS))
    assert caught.value.reached


def test_unanswered_call_ends_at_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="failed after 30 s: it was sent and no response arrived"):
        run(World(DeadlineExceeded("Stats")).do(STATS))


def test_within_sets_the_deadline_of_one_call() -> None:
    world = World(*(unreached() for _ in range(100)))

    async def go() -> float:
        until = asyncio.get_running_loop().time() + 2.0
        with pytest.raises(DeadlineExceeded, match="after 2 s"):
            await world.do(STATS, Context(deadline=until))
        assert set(world.deadlines) == {until}
        return asyncio.get_running_loop().time()

    assert run(go()) <= 2


def test_repeated_pop_waits_for_its_remaining_time_plus_the_deadline() -> None:
    world = World(*(UnavailableError("x") for _ in range(40)))

    async def go() -> float:
        with pytest.raises(DeadlineExceeded, match=r"^Pop failed after 40 s: "):
            await world.do(Pop("jobs", wait=10.0, request_id="r"))
        return asyncio.get_running_loop().time()

    assert 35 < run(go()) <= 40
    waits = [command.wait for command in world.commands]
    assert waits[0] == 10
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == 0


def test_closed_client_repeats_nothing() -> None:
    world = World()

    async def go() -> None:
        await world.do(STATS)
        await world.retrying.close()
        with pytest.raises(Closed):
            await world.do(STATS)

    run(go())
    assert world.channels[0].closed
    assert len(world.tries) == 1


@pytest.mark.parametrize("error", [unreached(), UnavailableError("reset"), Closed()], ids=str)
def test_call_in_progress_raises_closed_when_the_client_closes(
    error: HeaplineError,
) -> None:
    world = World(error)

    async def go() -> None:
        calling = asyncio.ensure_future(world.do(STATS))
        await asyncio.sleep(0)
        await world.retrying.close()
        with pytest.raises(Closed):
            await calling

    run(go())
    assert len(world.tries) == 1


def test_call_that_begins_after_its_deadline_is_not_sent() -> None:
    world = World()

    async def go() -> None:
        await asyncio.sleep(5)
        with pytest.raises(DeadlineExceeded) as caught:
            await world.do(ACK, Context(deadline=4.0))
        assert str(caught.value) == (
            "Ack failed after 30 s: it waited behind other calls and was not sent, so nothing changed"
        )

    run(go())
    assert world.tries == []


# -- what a repeated call reports --------------------------------------------------------------------------------------

CUT = UnavailableError("cut")
INFO = {"id": 1, "topic": "jobs", "partition": 0}


def test_every_settling_call_has_a_rule_or_is_reported_unchanged() -> None:
    settles = {kind.__name__ for kind in CALLS.values() if kind.facts.repeat is Repeat.SETTLES}
    assert settles - {kind.__name__ for kind in RECONCILE} == {"Ack", "GroupAck"}


@pytest.mark.parametrize("command", [Nack("jobs", LEASES), Release("jobs", LEASES)], ids=lambda c: type(c).__name__)
def test_repeated_nack_or_release_that_finds_no_lease_has_returned_the_message(command: Any) -> None:
    assert run(World(CUT, Settled([1])).do(command)) == Settled()
    assert run(World(Settled([1])).do(command)) == Settled([1]), "a first try reports lost leases"
    assert run(World(unreached(), Settled([1])).do(command)) == Settled([1]), "so does the first try that was sent"


def test_repeated_group_nack_that_finds_no_row_has_returned_it() -> None:
    rows = [PartitionRows(0, pack([7]))]
    command = GroupNack("jobs", "g", "m", rows, "s")
    assert run(World(CUT, LostRows(rows)).do(command)) == LostRows()
    assert run(World(LostRows(rows)).do(command)) == LostRows(rows)


def test_repeated_ack_is_reported_unchanged() -> None:
    assert run(World(CUT, Settled([1])).do(ACK)) == Settled([1])


def test_repeated_bury_reports_only_messages_that_did_not_die() -> None:
    dead, ready = MessageInfo(**INFO, state="dead"), MessageInfo(**INFO, state="ready")
    bury = Bury("jobs", LEASES)
    assert run(World(CUT, Settled([1, 2]), dead, ready).do(bury)) == Settled([2])
    assert run(World(CUT, Settled([1]), MessageNotFound("jobs", "1")).do(bury)) == Settled([1])


def test_repeated_cancel_that_finds_nothing_has_cancelled_the_message() -> None:
    cancelled, acked = MessageInfo(**INFO, state="cancelled"), MessageInfo(**INFO, state="acked")
    missing = [MessageNotFound("jobs", "1") for _ in range(3)]  # errors are annotated, so each answer needs its own
    assert run(World(CUT, missing[0], cancelled).do(Cancel("jobs", 1))) is None
    for script in ((CUT, missing[1], acked), (missing[2],)):
        with pytest.raises(MessageNotFound):
            run(World(*script).do(Cancel("jobs", 1)))


def leased(*ids: int) -> Leased:
    numbers = pack(ids)
    return Leased(
        "jobs",
        LeasedMessages(numbers, numbers, [b""] * len(ids), numbers, memoryview(bytes(len(ids))), numbers, numbers),
    )


def test_pop_has_one_request_id_for_all_its_tries_and_another_pop_has_another() -> None:
    world = World(CUT, CUT, leased(1), leased(2))

    async def go() -> None:
        await world.do(Pop("jobs"))
        await world.do(Pop("jobs"))

    run(go())
    ids = [command.request_id for command in world.commands]
    assert len(set(ids[:3])) == 1
    assert ids[3] not in (None, ids[0])


def test_repeated_pop_extends_its_leases_and_omits_expired_ones() -> None:
    world = World(CUT, leased(1, 2), Extended(pack([500, -1]), [2]))
    found = run(world.do(Pop("jobs", 2, visibility=30.0)))
    assert found.messages.ids.cast("q").tolist() == [1]
    assert found.messages.deadline_ms.cast("q").tolist() == [500]
    world = World(CUT, leased(1, 2), Extended(pack([-1, -1]), [1, 2]))
    assert run(world.do(Pop("jobs", 2, visibility=30.0))).messages is None


@pytest.mark.parametrize("named", [None, "mine"])
def test_leases_of_a_cancelled_pop_are_released_unless_repeatable(
    named: str | None,
) -> None:
    world = World()

    async def go() -> None:
        popping = asyncio.ensure_future(world.do(Pop("jobs", 5, wait=60.0, visibility=9.0, request_id=named)))
        await asyncio.sleep(0)
        popping.cancel()
        world.script = [leased(1, 2), Settled()]
        with pytest.raises(asyncio.CancelledError):
            await popping
        await world.retrying.leases.wait()

    run(go())
    first, *rest = world.commands
    if named is not None:
        assert rest == []
        return
    again, release = rest
    assert (again.request_id, again.wait, again.max_messages, again.visibility) == (first.request_id, 0.0, 1, None)
    assert type(release) is Release
    assert release.leases.ids.cast("q").tolist() == [1, 2]
