"""The proto and the commands agree in both directions, and every command and result survives its message."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from google.protobuf import message_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heapline.contract.call import BY_RPC, Call, Feed
from heapline.contract.columns import pack
from heapline.contract.config import Aging
from heapline.contract.dead_letters import DeleteDeadLetters
from heapline.contract.errors import BadName, BadRequest
from heapline.contract.groups import (
    EARLIEST,
    FetchedRows,
    GroupFetch,
    GroupSettings,
    PartitionBatch,
    ReplayGroupDeadLetters,
    StreamRows,
)
from heapline.contract.leases import Ack, Extend, LeasedMessages, LeaseKeys, Pop
from heapline.contract.message import Outgoing
from heapline.contract.messages import EnqueueBatch, NewMessages, pack_messages
from heapline.contract.replays import SaveCheckpoint
from heapline.contract.stream import Payloads, ReplayInfo
from heapline.contract.topics import CreateTopic, ListTopics, PauseTopic, TopicSettings, UpdateTopic
from heapline.wire.descriptors import METHODS, declared_pool, pb, read_descriptors
from heapline.wire.json import ROUTES
from heapline.wire.protobuf import EXTRAS, STREAMS, request_of, response_of
from tests.unit.wire.calls import ALL_CALLS, commands, results, same

QUICK = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
STREAM_MESSAGES = {"PopStreamRequest", "SubscribeRequest", "SubscribeResponse", "Settle", "SettleResult"}
calls = pytest.mark.parametrize("kind", ALL_CALLS, ids=lambda kind: kind.__name__)


def over_the_wire(codec: Any, value: Any, as_columns: bool = True) -> Any:
    message = codec.pack(value, as_columns)
    return codec.unpack(codec.message_class.FromString(message.SerializeToString()))


def test_every_method_is_a_call_or_a_stream_of_calls() -> None:
    assert METHODS.keys() - STREAMS == BY_RPC.keys()
    assert METHODS.keys() >= STREAMS
    for kind in ALL_CALLS:
        method = METHODS[kind.facts.rpc]
        assert (method.streams_in, method.streams_out) == (False, issubclass(kind, Feed))
    assert all(METHODS[name].streams_in and METHODS[name].streams_out for name in STREAMS)


@calls
def test_message_has_the_fields_of_the_call_and_no_others(kind: type[Call[Any]]) -> None:
    """Compiling a codec raises TypeError for a field that is missing on either side or has another type."""
    for codec in (request_of(kind), response_of(kind)):
        _ = codec.columns, codec.items
    assert request_of(kind).message_class.DESCRIPTOR.name == f"{kind.facts.rpc}Request"


def test_every_message_of_the_proto_belongs_to_a_call() -> None:
    reached: set[str] = set()

    def walk(message: Any) -> None:
        if message.name not in reached:
            reached.add(message.name)
            for field in message.fields:
                if field.message_type is not None:
                    walk(field.message_type)

    for kind in ALL_CALLS:
        walk(request_of(kind).message_class.DESCRIPTOR)
        walk(response_of(kind).message_class.DESCRIPTOR)
    declared = {message.name for message in read_descriptors().file[0].message_type}
    assert declared - reached == STREAM_MESSAGES
    assert reached >= EXTRAS.keys()


def test_reflection_shows_the_declared_proto() -> None:
    public = declared_pool().FindMessageTypeByName("heapline.v1.LeaseKeys")
    assert public.fields_by_name["ids"].type == public.fields_by_name["ids"].TYPE_SFIXED64
    assert pb.LeaseKeys.DESCRIPTOR.fields_by_name["ids"].type == public.fields_by_name["ids"].TYPE_BYTES


@calls
@QUICK
@given(data=st.data())
def test_command_survives_its_message(kind: type[Call[Any]], data: Any) -> None:
    command = data.draw(commands(kind))
    assert same(over_the_wire(request_of(kind), command), command)
    assert same(over_the_wire(request_of(kind), command, as_columns=False), command)


@calls
@QUICK
@given(data=st.data())
def test_result_survives_its_message(kind: type[Call[Any]], data: Any) -> None:
    result = data.draw(results(kind))
    assert same(over_the_wire(response_of(kind), result), result)
    assert same(over_the_wire(response_of(kind), result, as_columns=False), result)


OUTGOING = [
    Outgoing(b"a", 5, "k", 1.5, None, {"h": "v"}, 9.0, 3, "once", "pending", 7, "f"),
    Outgoing(b"b", -1, deliver_at=datetime(2030, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)),
    Outgoing(b""),
]


@pytest.mark.parametrize("as_columns", [True, False])
def test_messages_keep_every_field_as_columns_and_as_items(as_columns: bool) -> None:
    command = EnqueueBatch("jobs", pack_messages(OUTGOING[:1]), producer_id="p", epoch=1)
    assert same(over_the_wire(request_of(EnqueueBatch), command, as_columns), command)
    command = EnqueueBatch("jobs", pack_messages(OUTGOING[1:]), atomic=False)
    again = over_the_wire(request_of(EnqueueBatch), command, as_columns)
    assert same(again, command)
    assert again.messages.keys is None


def test_columns_of_numbers_are_packed_fields_for_other_languages() -> None:
    """A client that knows the field as `repeated sfixed64` writes and reads the same bytes."""
    public = message_factory.GetMessageClass(declared_pool().FindMessageTypeByName("heapline.v1.AckRequest"))
    sent = public(topic="jobs", leases={"ids": [1, 1 << 62], "tokens": [3, 4]})
    command = Ack("jobs", LeaseKeys(pack([1, 1 << 62]), pack([3, 4])))
    assert same(request_of(Ack).unpack(pb.AckRequest.FromString(sent.SerializeToString())), command)
    read = public.FromString(request_of(Ack).pack(command).SerializeToString())
    assert list(read.leases.ids) == [1, 1 << 62]


def test_absent_fields_have_the_defaults_of_the_command() -> None:
    assert request_of(Pop).unpack(pb.PopRequest(topic="jobs")) == Pop("jobs")
    assert request_of(GroupFetch).unpack(
        pb.GroupFetchRequest(topic="jobs", group="g", member="m", session="s")
    ) == GroupFetch("jobs", "g", "m", "s")
    assert GroupFetch("jobs", "g", "m", "s").start == EARLIEST
    assert request_of(ListTopics).unpack(pb.ListHeapsRequest()) == ListTopics()


def test_omitted_settings_stay_unset() -> None:
    command = UpdateTopic("jobs", TopicSettings(retention=0.0, partition_weights={}, dlq=False, ordering=Aging(2.0)))
    assert over_the_wire(request_of(UpdateTopic), command) == command
    command = CreateTopic("jobs", TopicSettings(ordering="strict", partition_weights={3: 2.0}))
    assert over_the_wire(request_of(CreateTopic), command) == command
    assert (
        request_of(GroupFetch)
        .unpack(pb.GroupFetchRequest(topic="jobs", group="g", member="m", session="s", config={}))
        .config
        == GroupSettings()
    )


def test_no_ids_and_an_empty_list_of_ids_differ() -> None:
    for rows in (None, []):
        assert over_the_wire(request_of(ReplayGroupDeadLetters), ReplayGroupDeadLetters("jobs", "g", rows)).rows == rows
    assert over_the_wire(request_of(DeleteDeadLetters), DeleteDeadLetters("jobs", [])).ids == []


def test_answer_is_in_items_unless_columns_are_requested() -> None:
    assert not pb.PopRequest(topic="jobs").as_columns
    assert request_of(Pop).pack(Pop("jobs")).as_columns
    one = LeasedMessages(
        pack([1]), pack([2]), [b"x"], pack([0]), pack([1], "B"), pack([5]), pack([6]), headers=[{"a": "b"}]
    )
    leased = Pop.result("jobs", one)
    message = response_of(Pop).pack(leased, as_columns=False)
    (item,) = message.messages.items
    assert (item.id, item.token, item.payload, item.headers) == (1, 2, b"x", {"a": "b"})
    assert not message.messages.ids
    assert same(response_of(Pop).unpack(message), leased)
    assert response_of(Pop).unpack(response_of(Pop).pack(Pop.result("jobs"))).messages is None


def with_unknown(message: Any) -> bytes:
    return message.SerializeToString() + b"\xf8\x3f\x01"  # field 1023, varint 1


def test_request_with_an_unknown_field_is_refused() -> None:
    message = pb.PopRequest.FromString(with_unknown(pb.PopRequest(topic="jobs")))
    with pytest.raises(BadRequest, match="unknown field 1023 of message PopRequest in a request of Pop"):
        request_of(Pop).unpack(message)
    start = pb.Position.FromString(with_unknown(pb.Position(edge="latest")))
    nested = pb.CreateGroupRequest(topic="jobs", group="g", start=start)
    with pytest.raises(BadRequest, match="of message Position in a request of CreateGroup"):
        request_of(BY_RPC["CreateGroup"]).unpack(nested)
    item = pb.LeaseKey.FromString(with_unknown(pb.LeaseKey(id=1)))
    with pytest.raises(BadRequest, match="of message LeaseKey in a request of Ack"):
        request_of(Ack).unpack(pb.AckRequest(topic="jobs", leases=pb.LeaseKeys(items=[item])))


def test_unknown_fields_of_a_response_are_ignored() -> None:
    message = pb.Count.FromString(with_unknown(pb.Count(count=3)))
    assert response_of(BY_RPC["Purge"]).unpack(message).count == 3


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.PopRequest(topic="jobs", max_messages=0), "max_messages must be an integer from 1 to 100000, got 0"),
        (pb.PopRequest(topic="jobs", wait=-1.0), "wait must be a number from 0"),
        (pb.EnqueueBatchRequest(topic="jobs"), "messages is required"),
        (pb.AckRequest(topic="jobs"), "leases is required"),
        (pb.AckRequest(topic="jobs", leases={"ids": b"12345678"}), "column tokens must have 8 bytes for 1 rows, got 0"),
        (
            pb.AckRequest(topic="jobs", leases={"items": [{"id": 1, "token": 2}, {"id": 3, "token": -1}]}),
            "ids and tokens of leases must be integers from 0 to 2",
        ),
        (pb.AckRequest(topic="jobs", leases={"ids": b"1"}), "column ids must have 8 bytes for each lease, got 1"),
        (
            pb.EnqueueBatchRequest(topic="jobs", messages={"payloads": [b"a"], "keys": ["k", "l"]}),
            "column keys must have 1 values for 1 rows, got 2",
        ),
        (
            pb.EnqueueBatchRequest(topic="jobs", messages={"payloads": [b"a"], "items": [{"payload": b"b"}]}),
            "NewMessages must have items or columns, not both",
        ),
        (
            pb.EnqueueBatchRequest(topic="jobs", messages={"items": [{"idempotency_scope": "ever"}]}),
            "idempotency_scope must be one of .*, got 'ever'",
        ),
        (pb.PauseRequest(topic="jobs", until_us=1 << 62), "is not a valid time"),
        (pb.ExtendRequest(topic="jobs", leases={}), "seconds must be a number from 0.001"),
        (pb.CreateGroupRequest(topic="jobs", group="g", start={}), "a position is one of edge, offset, offsets and at"),
    ],
)
def test_invalid_request_is_refused_with_the_contract_s_message(message: Any, text: str) -> None:
    kind = BY_RPC[message.DESCRIPTOR.name.removesuffix("Request")]
    with pytest.raises(BadRequest, match=text):
        request_of(kind).unpack(message)


def test_malformed_topic_raises_bad_name() -> None:
    with pytest.raises(BadName):
        request_of(PauseTopic).unpack(pb.PauseRequest(topic="a b"))


def test_equal_headers_of_two_messages_are_two_dicts() -> None:
    batch = NewMessages([b"a", b"b", b"c"], headers=[{"x": "1"}, {"x": "1"}, None])
    again = over_the_wire(request_of(EnqueueBatch), EnqueueBatch("jobs", batch)).messages.headers
    assert again == [{"x": "1"}, {"x": "1"}, None]
    assert again[0] is not again[1]


def test_payloads_that_share_a_buffer_are_packed_unchanged() -> None:
    data = memoryview(b"..abc.de")
    payloads = Payloads(data, np.array([2, 6, 0]), np.array([5, 8, 0]))
    rows = StreamRows(pack([1, 2, 3]), pack([4, 5, 6]), payloads, pack([0] * 3), pack([1] * 3, "B"), pack([0] * 3))
    fetched = FetchedRows("jobs", 1, [0], [PartitionBatch(0, rows)])
    for as_columns in (True, False):
        (batch,) = over_the_wire(response_of(GroupFetch), fetched, as_columns).batches
        assert batch.rows.payloads == [b"abc", b"de", b""]


def test_number_that_no_message_can_hold_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="cannot encode SaveCheckpoint as protobuf"):
        request_of(SaveCheckpoint).pack(SaveCheckpoint("jobs", "c", {1 << 70: 1}))


def test_extended_deadlines_are_packed() -> None:
    extended = Extend.result(pack([5, -1]), [9])
    assert same(over_the_wire(response_of(Extend), extended), extended)


def test_error_of_a_replay_does_not_show_paths_of_the_server() -> None:
    info = ReplayInfo(
        name="r", source="a", into="b", mode="all", state="failed", replayed=0, skipped=0, starts={}, positions={},
        ends={}, error="cannot read '/srv/data/topics/default/jobs-1/7.seg'",
    )  # fmt: skip
    message = response_of(BY_RPC["GetReplay"]).pack(info)
    assert message.error == "cannot read 'default/jobs-1/7.seg'"
    assert b"/srv" not in ROUTES[BY_RPC["GetReplay"]].encode(info)
