"""Which calls are repeated, where, how long, and what is said in the end. In virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.client.patience import FIRST_PAUSE, LONGEST_PAUSE, SECONDS, pauses
from heapline.client.retrying import ONCE, RetryingCalls
from heapline.errors import (
    BatchInDoubt,
    Closed,
    CorruptionError,
    DeadlineExceeded,
    HeaplineError,
    LeaseLost,
    ResourceExhausted,
    StorageFull,
    TopicNotFound,
    TopicReloading,
    Unauthenticated,
    UnavailableError,
)
from heapline.testing.loop import run
from heapline.wire.schema import pb


def unreached() -> UnavailableError:
    error = UnavailableError("failed to connect")
    error.reached = False
    return error


class FakeCalls:
    """A channel that answers as the world's script says."""

    def __init__(self, world: World, endpoint: str) -> None:
        self.world, self.endpoint = world, endpoint
        self.closed = False

    async def __call__(self, name: str, request: Any, seconds: float) -> Any:
        self.world.tries.append((self.endpoint, asyncio.get_running_loop().time()))
        self.world.waits.append(getattr(request, "wait", None))
        await asyncio.sleep(0)
        error = self.world.script.pop(0) if self.world.script else None
        if error is not None:
            raise error
        return "answer"

    async def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, *script: HeaplineError | None, endpoints: tuple[str, ...] = ("a:1",), deadline: float = 30.0):
        self.script = list(script)
        self.tries: list[tuple[str, float]] = []
        self.waits: list[Any] = []
        self.channels: list[FakeCalls] = []
        self.calls = RetryingCalls(endpoints, self._make, deadline)

    def _make(self, endpoint: str) -> Any:
        self.channels.append(FakeCalls(self, endpoint))
        return self.channels[-1]

    @property
    def places(self) -> list[str]:
        return [place for place, _ in self.tries]


def test_pauses_double_up_to_the_longest_and_are_never_quite_the_same() -> None:
    found = [pause for pause, _ in zip(pauses(), range(12), strict=False)]
    for i, pause in enumerate(found):
        most = min(LONGEST_PAUSE, FIRST_PAUSE * 2**i)
        assert most / 2 <= pause <= most
    assert len(set(found)) == 12


@pytest.mark.parametrize("error", [UnavailableError("x"), TopicReloading("jobs", "x"), Closed(), unreached()])
def test_what_passes_by_itself_is_repeated(error: HeaplineError) -> None:
    world = World(error, error)
    answer, doubt = run(world.calls.ask("Ack", pb.LeasesRequest()))
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
def test_what_is_an_answer_is_raised_at_once(error: HeaplineError) -> None:
    world = World(error)
    with pytest.raises(type(error)) as caught:
        run(world.calls("Ack", pb.LeasesRequest()))
    assert caught.value is error
    assert not error.repeated
    assert len(world.tries) == 1


def test_answer_after_a_try_that_may_have_been_carried_out_says_so() -> None:
    error = LeaseLost([1], "jobs")
    with pytest.raises(LeaseLost):
        run(World(UnavailableError("cut"), error).calls("Ack", pb.LeasesRequest()))
    assert error.repeated
    other = LeaseLost([1], "jobs")
    with pytest.raises(LeaseLost):
        run(World(unreached(), other).calls("Ack", pb.LeasesRequest()))
    assert not other.repeated, "nothing had left"


@pytest.mark.parametrize("name", sorted(ONCE))
def test_call_that_hits_twice_is_repeated_only_while_none_has_left(name: str) -> None:
    assert run(World(unreached(), unreached()).calls(name, pb.Heap())) == "answer"
    world = World(unreached(), UnavailableError("cut"))
    with pytest.raises(UnavailableError) as caught:
        run(world.calls(name, pb.Heap()))
    assert len(world.tries) == 2
    assert str(caught.value) == (
        f"{name} was sent and its answer did not come, so it may have been carried out (cut). It is not repeated by "
        "itself, because that would also hit what came in between: look, and call again if it is still wanted"
    )


def test_endpoints_take_turns_when_one_fails_and_a_channel_that_failed_is_closed() -> None:
    world = World(UnavailableError("1"), UnavailableError("2"), UnavailableError("3"), endpoints=("a:1", "b:1"))

    async def go() -> None:
        await world.calls("Stats", pb.Heap())
        await world.calls("Stats", pb.Heap())
        await asyncio.sleep(1)

    run(go())
    assert world.places == ["a:1", "b:1", "a:1", "b:1", "b:1"]
    assert [c.closed for c in world.channels] == [True, True, True, False]


def test_topic_that_reloads_is_no_reason_to_leave_a_server() -> None:
    world = World(TopicReloading("jobs", "x"), endpoints=("a:1", "b:1"))
    run(world.calls("Stats", pb.Heap()))
    assert world.places == ["a:1", "a:1"]
    assert len(world.channels) == 1


def test_deadline_without_a_connection_says_that_nothing_was_changed() -> None:
    world = World(*(unreached() for _ in range(1000)), endpoints=("a:1", "b:1"))

    async def go() -> float:
        with pytest.raises(DeadlineExceeded) as caught:
            await world.calls("Stats", pb.Heap())
        assert str(caught.value) == (
            "Stats was given up after 30 s: none of a:1, b:1 could be reached, so nothing was changed; "
            "is `heapline serve` running there?"
        )
        assert not caught.value.reached
        return asyncio.get_running_loop().time()

    assert 25 < run(go()) <= 30
    assert 12 < len(world.tries) < 60


def test_deadline_in_doubt_says_that_it_may_have_been_done() -> None:
    world = World(*(UnavailableError("cut off") for _ in range(100)), deadline=3.0)
    with pytest.raises(
        DeadlineExceeded, match=r"after 3 s: it was sent .* may have been carried out \(last: cut"
    ) as caught:
        run(world.calls("Stats", pb.Heap()))
    assert caught.value.reached


def test_call_that_nobody_answers_is_given_up() -> None:
    with pytest.raises(DeadlineExceeded, match="given up after 30 s: it was sent and its answer did not come"):
        run(World(DeadlineExceeded("Stats")).calls("Stats", pb.Heap()))


def test_deadline_of_one_call_is_its_own() -> None:
    world = World(*(unreached() for _ in range(100)))

    async def go() -> float:
        SECONDS.set(2.0)
        with pytest.raises(DeadlineExceeded, match="after 2 s"):
            await world.calls("Stats", pb.Heap())
        return asyncio.get_running_loop().time()

    assert run(go()) <= 2


def test_repeated_pop_waits_for_the_rest_of_its_time_and_the_deadline_comes_on_top() -> None:
    world = World(*(UnavailableError("x") for _ in range(40)))

    async def go() -> float:
        with pytest.raises(DeadlineExceeded, match=r"^Pop was given up after 40 s: "):
            await world.calls("Pop", pb.PopRequest(topic="jobs", wait=10.0))
        return asyncio.get_running_loop().time()

    assert 35 < run(go()) <= 40
    assert world.waits[0] == 10
    assert world.waits == sorted(world.waits, reverse=True)
    assert world.waits[-1] == 0


def test_closed_client_repeats_nothing() -> None:
    world = World()

    async def go() -> None:
        await world.calls("Stats", pb.Heap())
        await world.calls.close()
        with pytest.raises(Closed):
            await world.calls("Stats", pb.Heap())

    run(go())
    assert world.channels[0].closed
    assert len(world.tries) == 1


@pytest.mark.parametrize("error", [unreached(), UnavailableError("reset"), Closed()], ids=str)
def test_call_under_way_when_the_client_closes_says_that_it_was_closed_however_its_connection_ends(
    error: HeaplineError,
) -> None:
    world = World(error)

    async def go() -> None:
        calling = asyncio.ensure_future(world.calls("Stats", pb.Heap()))
        await asyncio.sleep(0)
        await world.calls.close()
        with pytest.raises(Closed):
            await calling

    run(go())
    assert len(world.tries) == 1


def test_call_that_begins_after_its_deadline_is_not_sent() -> None:
    world = World()

    async def go() -> None:
        await asyncio.sleep(5)
        with pytest.raises(DeadlineExceeded) as caught:
            await world.calls.ask("Ack", pb.LeasesRequest(), until=4.0)
        assert str(caught.value) == (
            "Ack was given up after 30 s: it waited behind other calls and was never sent, so nothing was changed"
        )

    run(go())
    assert world.tries == []
