"""The gate and the dispatcher, on a fake broker: rights, rows, limits, confirmation, waiting and returned leases."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from heapline.contract.batches import PrepareBatch, Share
from heapline.contract.call import BY_RPC, HERE, Context, Count, Feed, Page, Right
from heapline.contract.columns import pack
from heapline.contract.errors import (
    BadRequest,
    ConfirmationNeeded,
    PayloadTooLarge,
    PermissionDenied,
    RateLimited,
    ReplayNotFound,
    ResourceExhausted,
    TopicNotFound,
    Unauthenticated,
)
from heapline.contract.leases import Leased, LeasedMessages, Pop
from heapline.contract.log import GetOffsets, ReadLog
from heapline.contract.messages import Enqueue, EnqueueBatch, NewMessages
from heapline.contract.replays import CancelReplay, GetReplay
from heapline.contract.schedules import CreateSchedule, ListSchedules
from heapline.contract.stream import ReplayInfo
from heapline.contract.topics import CreateTopic, GetTopic, ListTopics, Purge, Stats
from heapline.server.gate import Request, Stopping
from heapline.server.limits import ANSWER_BYTES_MAX
from heapline.wire.descriptors import METHODS
from tests.unit.server.fake_broker import FakeBroker
from tests.unit.server.rig import ALL, Rig


def leased(*ids: int) -> Leased:
    n = len(ids)
    zeros = pack([0] * n)
    columns = LeasedMessages(pack(ids), pack(ids), [b"x"] * n, zeros, memoryview(bytes(n)), zeros, zeros)
    return Leased("jobs", columns)


def replay(source: str) -> Any:
    return _Replay(name="r", source=source)


class _Replay(SimpleNamespace):
    pass


@pytest.fixture(autouse=True)
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from heapline.server import dispatcher

    monkeypatch.setitem(dispatcher.HIDDEN, _Replay, dispatcher.HIDDEN[ReplayInfo])


# -- facts -------------------------------------------------------------------------------------------------------------


def test_every_call_names_a_right_filters_its_rows_or_is_open_to_every_caller() -> None:
    open_calls = {rpc for rpc, kind in BY_RPC.items() if not kind.facts.needs and kind.facts.rows is None}
    assert open_calls == {"Describe"}


def test_every_stream_of_the_proto_is_a_feed_or_carries_commands() -> None:
    streams = {name for name, method in METHODS.items() if method.streams_out}
    feeds = {rpc for rpc, kind in BY_RPC.items() if issubclass(kind, Feed)}
    assert streams - feeds == {"EnqueueStream", "PopStream", "Subscribe"}
    assert feeds <= streams


def test_fields_named_by_rights_and_audit_exist() -> None:
    for kind in BY_RPC.values():
        fields = set(kind.__struct_fields__) | set(dir(kind))
        for access in kind.facts.needs:
            assert not access.on or kind.facts.lookup or access.on.partition(".")[0] in fields, kind
        for name in kind.facts.audit or ():
            assert name in fields, kind


# -- rights ------------------------------------------------------------------------------------------------------------


async def test_command_reaches_the_broker_with_the_callers_context() -> None:
    rig = Rig(FakeBroker(GetOffsets=lambda c: "offsets"), leases_per_consumer=7)
    async with rig.request("Offsets", traceparent="00-ab-cd-01") as request:
        assert await rig.dispatcher.run(GetOffsets("jobs"), request) == "offsets"
    (context,) = rig.broker.contexts
    assert (context.principal, context.trace, context.leases_max) == (f"key:{ALL}", "00-ab-cd-01", 7)


@pytest.mark.parametrize(
    ("command", "scopes"),
    [
        (Enqueue("jobs", b"x"), "jobs:consume,admin"),
        (Pop("jobs"), "jobs:produce other:consume"),
        (CreateTopic("jobs"), "jobs:produce,consume"),
        (GetTopic("jobs"), "other:consume"),
        (PrepareBatch("b", "p", [Share("jobs", NewMessages([])), Share("other", NewMessages([]))]), "jobs:produce"),
        (CreateSchedule("nightly", "jobs", every=60.0), "jobs:produce"),
        (CreateSchedule("nightly", "jobs", every=60.0), "nightly:admin"),
    ],
)
async def test_caller_without_the_right_is_denied_before_the_broker_is_called(command: Any, scopes: str) -> None:
    rig = Rig()
    with pytest.raises(PermissionDenied) as caught:
        await rig.run(command, scopes)
    assert caught.value.subject == f"key:{scopes}"
    assert rig.broker.received == []


def test_request_that_was_not_entered_has_no_rights_and_no_context() -> None:
    rig = Rig()
    request = Request(rig.gate, "http", "Stats", {"authorization": ALL})
    with pytest.raises(PermissionDenied):
        rig.gate.check(request, Stats("jobs"))
    with pytest.raises(Unauthenticated):
        request.context()


async def test_any_right_is_enough_where_no_special_one_is_needed() -> None:
    rig = Rig(FakeBroker(GetTopic=lambda c: "info"))
    for right in Right:
        assert await rig.run(GetTopic("jobs"), f"jobs:{right.value}") == "info"


async def test_rights_on_referenced_rows_are_checked_and_hidden_rows_not_found() -> None:
    rig = Rig(FakeBroker(GetReplay=lambda c: replay("jobs"), CancelReplay=lambda c: "cancelled"))
    assert await rig.run(CancelReplay("r"), "jobs:consume,admin") == "cancelled"
    with pytest.raises(PermissionDenied):
        await rig.run(CancelReplay("r"), "jobs:consume")
    for command in (CancelReplay("r"), GetReplay("r")):
        with pytest.raises(ReplayNotFound):
            await rig.run(command, "other:consume,admin")
    assert rig.broker.kinds().count("CancelReplay") == 1


async def test_unauthenticated_caller_is_rejected_when_the_request_is_entered() -> None:
    rig = Rig()
    with pytest.raises(Unauthenticated):
        async with rig.request("Stats", ""):
            raise AssertionError("entered")
    assert rig.gate.requests_open == 0


# -- rows --------------------------------------------------------------------------------------------------------------


def listed(command: ListTopics) -> Page[Any]:
    """One topic per page: a, b, c, d."""
    at = int(command.cursor or 0)
    return Page([SimpleNamespace(name="abcd"[at])], str(at + 1) if at < 3 else None)


async def test_rows_without_a_right_are_omitted_and_cursors_do_not_reveal_them() -> None:
    rig = Rig(FakeBroker(ListTopics=listed))
    first = await rig.run(ListTopics(), "b:consume d:produce")
    assert [info.name for info in first.items] == ["b"]
    assert first.cursor.startswith(".")
    rest = await rig.run(ListTopics(first.cursor), "b:consume d:produce")
    assert ([info.name for info in rest.items], rest.cursor) == (["d"], None)
    everything = await rig.run(ListTopics())
    assert everything.cursor == "1"  # a caller that sees all rows gets the broker's own cursor


@pytest.mark.parametrize("cursor", ["made-up", "1", ".", ".x", ".AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"])
async def test_invalid_cursor_is_a_bad_request(cursor: str) -> None:
    with pytest.raises(BadRequest):
        await Rig(FakeBroker(ListTopics=listed)).run(ListTopics(cursor), "b:consume")


async def test_last_page_without_visible_rows_is_empty_and_ends_the_list() -> None:
    rig = Rig(FakeBroker(ListSchedules=lambda c: Page([SimpleNamespace(name="a/b")])))
    page = await rig.run(ListSchedules(), "jobs:admin")
    assert (page.items, page.cursor) == ([], None)


async def test_search_through_hidden_pages_lets_other_requests_run() -> None:
    def hidden(command: ListTopics) -> Page[Any]:
        at = int(command.cursor or 0)
        return Page([SimpleNamespace(name="a")], str(at + 1) if at < 500 else None)

    rig = Rig(FakeBroker(ListTopics=hidden, Stats=lambda c: "stats"))
    listing = asyncio.create_task(rig.run(ListTopics(), "b:consume"))
    await asyncio.sleep(0)
    assert await rig.run(Stats("jobs")) == "stats"
    assert not listing.done(), "the list did not keep the event loop until its end"
    assert (await listing).items == []


@pytest.mark.parametrize("limit", [1, 3, 40])
@pytest.mark.parametrize("visible", [[], [999], [0, 1, 2, 500, 501, 998], range(300, 400)], ids=str)
async def test_hidden_rows_are_searched_in_few_pages_and_no_row_is_skipped(visible: Sequence[int], limit: int) -> None:
    asked: list[int] = []

    def pages(command: ListTopics) -> Page[Any]:
        asked.append(command.limit)
        at = int(command.cursor or 0)
        end = min(1000, at + command.limit)
        names = ("seen" if i in visible else "other" for i in range(at, end))
        rows = [SimpleNamespace(name=f"{name}/{i}") for name, i in zip(names, range(at, end), strict=True)]
        return Page(rows, str(end) if end < 1000 else None)

    rig, found, cursor = Rig(FakeBroker(ListTopics=pages)), list[int](), None
    while True:
        page = await rig.run(ListTopics(cursor, limit), "seen/*:consume")
        assert len(page.items) <= limit
        found += [int(row.name.partition("/")[2]) for row in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == list(visible)
    assert len(asked) <= 12 + 20 * len(visible)


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_calls_in_flight_are_limited_per_key_and_rejected_ones_not_counted() -> None:
    rig = Rig(FakeBroker(Stats=lambda c: "stats", CreateTopic=lambda c: "info"), inflight_per_key=1)
    for _ in range(3):
        with pytest.raises(PermissionDenied):
            await rig.run(CreateTopic("jobs"), "jobs:consume")
    async with rig.request("Stats") as request:
        await rig.dispatcher.run(Stats("jobs"), request)
        with pytest.raises(ResourceExhausted, match="calls in flight"):
            await rig.run(Stats("jobs"))
        assert await rig.run(Stats("jobs"), "*:consume") == "stats"
    assert await rig.run(Stats("jobs")) == "stats"
    assert len(rig.gate.calls.held) == 0


async def test_command_of_a_stream_waits_for_its_rate_but_not_for_long() -> None:
    rig = Rig(FakeBroker(Stats=lambda c: "stats"), calls_per_second=1.0)
    async with rig.request("Stats") as request:
        rig.gate.admit(request, Stats("jobs"))
        waiting = asyncio.ensure_future(rig.dispatcher.paced_step(Stats("jobs"), request))
        await asyncio.sleep(0)
        assert not waiting.done()
        rig.clock.advance(1)
        assert await waiting == "stats"
    slow = Rig(calls_per_second=0.1)
    async with slow.request("Stats") as request:
        slow.gate.admit(request, Stats("jobs"))
        with pytest.raises(RateLimited, match="retry in 10 s"):
            await slow.dispatcher.paced_step(Stats("jobs"), request)


async def test_command_that_waits_for_its_rate_ends_with_the_server() -> None:
    rig = Rig(FakeBroker(Stats=lambda c: "stats"), calls_per_second=1.0)
    async with rig.request("Stats") as request:
        rig.gate.admit(request, Stats("jobs"))
        waiting = asyncio.ensure_future(rig.dispatcher.paced_step(Stats("jobs"), request))
        await asyncio.sleep(0)
        rig.gate.stopping.set()
        with pytest.raises(RateLimited):
            await waiting


async def test_stream_over_the_limit_is_rejected_and_a_failed_one_not_counted() -> None:
    rig = Rig(streams_per_key=1)

    async def stream(*inside: Any) -> None:
        async with Request(rig.gate, "grpc", "PopStream", {"authorization": ALL}, is_stream=True) as request:
            rig.gate.admit(request)
            for step in inside:
                await step()
            raise RuntimeError("the stream broke")

    async def another() -> None:
        with pytest.raises(ResourceExhausted, match=r"open streams of key:.*: the limit of 1 is reached"):
            await stream()

    for _ in range(3):
        with pytest.raises(RuntimeError):
            await stream(another)
    assert len(rig.gate.streams.held) == 0


@pytest.mark.parametrize(
    "command",
    [
        Enqueue("jobs", b"x" * 11),
        EnqueueBatch("jobs", NewMessages([b"", b"x" * 11])),
        PrepareBatch("b", "p", [Share("other", NewMessages([b""])), Share("jobs", NewMessages([b"x" * 11]))]),
        CreateSchedule("nightly", "jobs", b"x" * 11, every=60.0),
    ],
)
async def test_payload_over_the_servers_limit_is_rejected(command: Any) -> None:
    rig = Rig(payload_bytes_max=10)
    with pytest.raises(PayloadTooLarge, match="the limit of 10 \\(the server's payload_bytes_max\\)") as caught:
        await rig.run(command)
    assert (caught.value.size, caught.value.limit, caught.value.topic) == (11, 10, "jobs")
    assert rig.broker.received == []


async def test_answers_are_bounded_in_bytes() -> None:
    rig = Rig(FakeBroker(Pop=lambda c: leased()))
    await rig.run(Pop("jobs", max_bytes=1 << 40))
    assert rig.broker.received[0].max_bytes == ANSWER_BYTES_MAX


# -- confirmation ------------------------------------------------------------------------------------------------------


async def test_destructive_command_runs_only_with_the_token_for_it() -> None:
    rig = Rig(FakeBroker(Purge=lambda c: Count(3), GetTopic=lambda c: "info"))
    with pytest.raises(ConfirmationNeeded) as needed:
        await rig.run(Purge("jobs"))
    token = needed.value.token
    for command, who in ((Purge("other"), ALL), (Purge("jobs"), "*:admin")):
        with pytest.raises(ConfirmationNeeded):
            await rig.run(command, who, token)
    assert "Purge" not in rig.broker.kinds()
    assert (await rig.run(Purge("jobs"), confirmation=token)).count == 3
    with pytest.raises(ConfirmationNeeded):
        await rig.run(Purge("jobs"), confirmation=token)


async def test_topic_that_does_not_exist_needs_no_confirmation() -> None:
    def missing(command: GetTopic) -> Any:
        raise TopicNotFound(command.topic)

    with pytest.raises(TopicNotFound):
        await Rig(FakeBroker(GetTopic=missing)).run(Purge("jobs"))


# -- waiting -----------------------------------------------------------------------------------------------------------


class Waiting(FakeBroker):
    """A broker whose pops wait until the test lets them go."""

    def __init__(self) -> None:
        super().__init__(Pop=self._pop, Release=lambda c: None)
        self.go = asyncio.Event()
        self.granted = False

    async def _pop(self, command: Pop) -> Leased:
        await self.go.wait()
        self.granted = True
        return leased(1, 2)

    def released(self) -> list[list[int]]:
        return [list(c.leases.ids.cast("q")) for c in self.received if type(c).__name__ == "Release"]


async def steps(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begin(rig: Rig, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(rig.run(Pop("jobs", wait=60.0, **options)))
    await steps()
    return task


async def test_stopping_ends_waiting_calls_and_no_others() -> None:
    rig = Rig(Waiting())
    waiting = await begin(rig)
    rig.gate.stopping.set()
    rig.dispatcher.stop_waiting()
    with pytest.raises(Stopping):
        await waiting
    with pytest.raises(Stopping):
        await rig.run(Stats("jobs"))


async def test_revoked_credential_ends_a_waiting_call() -> None:
    rig = Rig(Waiting())
    waiting = await begin(rig)
    assert len(rig.gate.credentials) == 1
    rig.guard.revoked.add(ALL)
    rig.gate.credentials.check()
    with pytest.raises(Unauthenticated):
        await waiting
    assert len(rig.gate.credentials) == 0


@pytest.mark.parametrize("request_id", [None, "r"])
@pytest.mark.parametrize("later", range(4))
async def test_leases_of_a_disconnected_caller_are_returned_unless_named(later: int, request_id: str | None) -> None:
    broker = Waiting()
    rig = Rig(broker)
    waiting = await begin(rig, request_id=request_id)
    broker.go.set()
    await steps(later)  # at some time the pop has its result and its caller has not received it yet
    waiting.cancel()
    ended = await asyncio.gather(waiting, return_exceptions=True)
    await steps()
    is_lost = broker.granted and isinstance(ended[0], asyncio.CancelledError)
    assert broker.released() == ([[1, 2]] if is_lost and request_id is None else [])


async def test_result_that_arrives_as_its_credential_ends_is_returned() -> None:
    broker = Waiting()
    rig = Rig(broker)
    waiting = await begin(rig)
    broker.go.set()
    await asyncio.sleep(0)
    rig.guard.revoked.add(ALL)
    rig.gate.credentials.check()
    with pytest.raises(Unauthenticated):
        await waiting
    await steps()
    assert broker.granted
    assert broker.released() == [[1, 2]]


class Futures(FakeBroker):
    """A broker whose pops are futures that the test completes."""

    def do(self, command: Any, context: Context = HERE, /) -> Any:  # type: ignore[override]
        self.future = asyncio.get_running_loop().create_future()
        return self.future


@pytest.mark.parametrize("end", ["stop", "revoke", "cancel", "answer"])
async def test_pop_that_waits_on_a_future_of_the_broker_ends_without_a_task(end: str) -> None:
    broker = Futures()
    rig = Rig(broker)
    async with rig.request("Pop") as request:
        answer: Any = rig.dispatcher.start(Pop("jobs", wait=60.0), request)
        assert answer is broker.future
        assert len(rig.gate.credentials) == 1
        if end == "stop":
            rig.dispatcher.stop_waiting()
        elif end == "revoke":
            rig.guard.revoked.add(ALL)
            rig.gate.credentials.check()
        elif end == "cancel":
            answer.cancel()
        else:
            answer.set_result(leased(1))
        outcome: Any = (await asyncio.gather(answer, return_exceptions=True))[0]
        wanted = {"stop": Stopping, "revoke": Unauthenticated, "cancel": asyncio.CancelledError, "answer": Leased}
        assert type(outcome) is wanted[end]
        await steps()
        assert len(rig.gate.credentials) == 0
        rig.dispatcher.stop_waiting()  # it is no longer tracked


@pytest.mark.parametrize("is_future", [False, True])
async def test_leases_of_a_topic_deleted_meanwhile_need_no_return(is_future: bool, caplog: Any) -> None:
    class Deleted(FakeBroker):
        def do(self, command: Any, context: Context = HERE, /) -> Any:  # type: ignore[override]
            if is_future:
                future = asyncio.get_running_loop().create_future()
                future.set_exception(TopicNotFound(command.topic))
                return future
            raise TopicNotFound(command.topic)  # `do` may raise instead of returning an awaitable

    rig = Rig(Deleted())
    async with rig.request("Pop") as request:
        rig.dispatcher.return_leases(Pop("jobs"), leased(1, 2), request)
    await steps()
    gc.collect()
    assert not caplog.records


async def test_cancelled_wait_raises_cancelled_error() -> None:
    rig = Rig(Waiting())
    waiting = await begin(rig)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert rig.gate.requests_open == 0


# -- feeds and own handlers --------------------------------------------------------------------------------------------


async def test_feed_sends_items_until_the_server_stops() -> None:
    rig = Rig(FakeBroker(ReadLog=lambda c: [1, 2, 3]))
    sent: list[int] = []

    async def send(item: int) -> None:
        sent.append(item)
        if len(sent) == 2:
            rig.gate.stopping.set()

    async with Request(rig.gate, "grpc", "ReadLog", {"authorization": ALL}, is_stream=True) as request:
        with pytest.raises(Stopping):
            await rig.dispatcher.feed(ReadLog("jobs"), request, send)
    assert sent == [1, 2]


async def test_server_handlers_take_precedence_over_the_broker() -> None:
    async def stats(command: Stats, request: Request) -> str:
        return f"{command.topic} for {request.caller.subject}"

    rig = Rig(own={Stats: stats})
    assert await rig.run(Stats("jobs"), "jobs:consume") == "jobs for key:jobs:consume"
    with pytest.raises(PermissionDenied):
        await rig.run(Stats("jobs"), "jobs:produce")
    assert rig.broker.received == []
