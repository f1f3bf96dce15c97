"""Commands and results survive their JSON, and the JSON is readable."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from heapline.contract.admin import ListKeys, UpdateUser
from heapline.contract.batches import ForgetSink
from heapline.contract.call import Call
from heapline.contract.columns import pack
from heapline.contract.dead_letters import DeleteDeadLetters, ListDeadLetters
from heapline.contract.errors import BadName, BadRequest, DeliveryLost, HeaplineError, LeaseLost, TopicNotFound
from heapline.contract.groups import GroupAck, GroupFetch, LostRows, PartitionRows, Position, ResetOffsets
from heapline.contract.ids import to_ulid
from heapline.contract.leases import Ack, Extend, Extended, Leased, LeasedMessages, LeaseKeys, Pop, Settled
from heapline.contract.log import ReadLog
from heapline.contract.message import DlqFilter, Enqueued, LogEvent, LogFrame, MessageInfo, Outgoing
from heapline.contract.messages import Enqueue, EnqueueBatch, GetMessage, NewMessages, Peek, RowError, pack_messages
from heapline.contract.replays import Replay
from heapline.contract.schedules import CreateSchedule, GetSchedule
from heapline.contract.topics import (
    CreateTopic,
    GetTopic,
    ListStats,
    PauseTopic,
    Purge,
    Stats,
    TopicSettings,
    UpdateTopic,
)
from heapline.wire.json import ROUTES, JsonOptions, check_lost, error_response, find, openapi, read_error
from tests.unit.wire.calls import commands, results, same

QUICK = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
ID = 1 << 60
SUFFIX = 5
ULID = to_ulid(ID, SUFFIX)
LEASE = {"message_id": ULID, "lease_token": "42"}
KINDS = sorted(ROUTES, key=lambda kind: kind.facts.id)
calls = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def post(kind: type[Call[Any]], path: dict[str, str] | None = None, /, **body: Any) -> Any:
    return ROUTES[kind].read(path or {}, {}, json.dumps(body).encode())


def get(kind: type[Call[Any]], path: dict[str, str] | None = None, /, **query: str) -> Any:
    return ROUTES[kind].read(path or {}, query, b"")


@calls
@QUICK
@given(data=st.data())
def test_command_survives_its_request(kind: type[Call[Any]], data: Any) -> None:
    command = data.draw(commands(kind))
    method, path, query, body = ROUTES[kind].write(command)
    assume(method != "GET" or getattr(command, "where", None) != DlqFilter())  # in a query it is the same as none
    found = find(method, path)
    assert found is not None
    route, names = found
    assert route is ROUTES[kind]
    assert same(route.read(names, query, body)[0], command)


@calls
@QUICK
@given(data=st.data())
def test_result_survives_its_answer(kind: type[Call[Any]], data: Any) -> None:
    result = data.draw(results(kind))
    line = ROUTES[kind].encode(result)
    assert b"\n" not in line
    assert same(ROUTES[kind].decode(line), result)


# -- requests ----------------------------------------------------------------------------------------------------------


def test_payload_is_base64_text_or_json_as_it_was_written() -> None:
    assert post(Enqueue, topic="jobs", payload="aGVsbG8=")[0].payload == b"hello"
    assert post(Enqueue, topic="jobs", payload_text="né")[0].payload == "né".encode()
    raw = b'{"topic":"jobs","payload_json":{"b": 1.0,  "a":12345678901234567890}}'
    assert ROUTES[Enqueue].read({}, {}, raw)[0].payload == b'{"b": 1.0,  "a":12345678901234567890}'
    batch = post(EnqueueBatch, topic="jobs", messages=[{"payload_text": "a", "priority": 5}, {"payload_json": None}])[0]
    assert same(batch.messages, NewMessages([b"a", b"null"], pack([5, 0])))
    assert post(CreateSchedule, name="n", topic="jobs", every=5)[0].payload == b""


@pytest.mark.parametrize("payloads", [{}, {"payload": "", "payload_text": ""}, {"payload_text": "", "payload_json": 1}])
def test_message_needs_exactly_one_payload(payloads: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="give exactly one of payload"):
        post(Enqueue, topic="jobs", **payloads)
    with pytest.raises(BadRequest, match="give exactly one of payload"):
        post(EnqueueBatch, topic="jobs", messages=[payloads])


@pytest.mark.parametrize("id", [ULID, str(ID), ULID.lower()])
def test_lease_is_one_pair_or_a_list_of_pairs(id: str) -> None:
    wanted = Ack("jobs", LeaseKeys(pack([ID]), pack([7])))
    assert same(post(Ack, topic="jobs", message_id=id, lease_token="7")[0], wanted)
    assert same(post(Ack, topic="jobs", leases=[{"message_id": id, "lease_token": "7"}])[0], wanted)
    assert len(post(Ack, topic="jobs", leases=[])[0].leases) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"message_id": "1"},
        {"lease_token": "1"},
        {"message_id": "1", "lease_token": "1", "leases": []},
    ],
)
def test_half_a_lease_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="give message_id and lease_token, or a list"):
        post(Ack, topic="jobs", **fields)


def test_settings_of_a_topic_are_beside_its_name() -> None:
    command = post(CreateTopic, topic="jobs", partitions=4, partition_weights={"1": 2.0}, ordering="strict")[0]
    settings = TopicSettings(partitions=4, partition_weights={1: 2.0}, ordering="strict")
    assert command == CreateTopic("jobs", settings)
    assert post(UpdateTopic, {"topic": "jobs"}, retention=0.0)[0] == UpdateTopic("jobs", TopicSettings(retention=0.0))
    assert post(CreateTopic, topic="jobs")[0] == CreateTopic("jobs")


def test_filter_is_in_the_query_of_a_list_and_in_the_body_of_a_change() -> None:
    query = {"limit": "5", "reason": "x", "priority_min": "-3", "died_after": "2030-01-01T00:00:00Z"}
    command, _ = get(ListDeadLetters, topic="jobs", **query)
    where = DlqFilter(reason="x", priority_min=-3, died_after=datetime(2030, 1, 1, tzinfo=UTC))
    assert command == ListDeadLetters("jobs", 5, where=where)
    assert get(ListDeadLetters, topic="jobs")[0].where is None
    assert post(DeleteDeadLetters, topic="jobs", where={})[0].where == DlqFilter()


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("latest", Position(edge="latest")),
        (7, Position(offset=7)),
        ({"0": 5, "12": 6}, Position(offsets={0: 5, 12: 6})),
        ("2030-01-31T12:00:00Z", Position(at=datetime(2030, 1, 31, 12, tzinfo=UTC))),
    ],
)
def test_position_has_readable_forms(place: Any, wanted: Position) -> None:
    assert post(ResetOffsets, {"topic": "jobs", "group": "g"}, to=place)[0].to == wanted
    assert post(Replay, topic="jobs", start=place)[0].start == wanted


@pytest.mark.parametrize("place", ["soon", {}, {"x": 1}, -1, 1.5])
def test_invalid_position_is_refused(place: Any) -> None:
    with pytest.raises(BadRequest):
        post(Replay, topic="jobs", start=place)


def test_rows_are_offsets_by_partition() -> None:
    command, options = post(
        GroupAck, {"topic": "jobs", "group": "g"}, member="m", session="s", rows={"3": [5, 6]}, tell_lost=True
    )
    assert same(command, GroupAck("jobs", "g", "m", [PartitionRows(3, pack([5, 6]))], "s"))
    assert options.tell_lost


def test_options_are_read_from_body_and_query_where_the_route_has_them() -> None:
    assert post(Pop, topic="jobs", payload_as="json")[1] == JsonOptions(payload_as="json")
    body = b'{"topic": "jobs"}'
    assert ROUTES[Pop].read({}, {"payload_as": "text"}, body)[1] == JsonOptions(payload_as="text")
    assert get(Peek, topic="jobs", payload_as="text") == (Peek("jobs"), JsonOptions(payload_as="text"))
    options = ROUTES[Purge].read({"topic": "jobs"}, {"force": "true", "confirmation": "t"}, b"")[1]
    assert options == JsonOptions(force=True, confirmation="t")
    assert get(ForgetSink, {"name": "s"}, force="true")[1].force
    with pytest.raises(BadRequest, match="unknown parameter 'topic'; the parameters of Pop are payload_as"):
        ROUTES[Pop].read({}, {"topic": "jobs"}, b"{}")
    with pytest.raises(BadRequest, match="payload_as must be one of 'base64', 'json', 'text', got 'x'"):
        ROUTES[Pop].read({}, {"payload_as": "x"}, body)


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (Pop, {"topic": "jobs", "max_messages": 0}, "max_messages must be an integer from 1 to 100000, got 0"),
        (Pop, {"topic": "jobs", "wait": "x"}, "wait must be a number from 0 to .*, got 'x'"),
        (Pop, {"max_messages": 3}, "topic is required"),
        (Pop, {"topic": "jobs", "nosuch": 1}, "unknown field 'nosuch'; Pop has topic, max_messages"),
        (PauseTopic, {"until": "2030-01-01T00:00:00"}, "until must be a time with a time zone or None"),
        (PauseTopic, {"topic": "jobs"}, "unknown field 'topic'; PauseTopic has until"),
        (Enqueue, {"topic": "jobs", "payload_json": {"a": 1}, "delay": "x"}, "delay must be a number"),
        (Ack, {"topic": "jobs", "message_id": "x", "lease_token": "1"}, "'x' is not a message id"),
        (Enqueue, {"topic": "jobs", "payload": "a b"}, r"payload must be base64 \(payload_text .*\), got 'a b'"),
        (Ack, {"topic": "jobs", "message_id": "1", "lease_token": "x"}, "lease_token must be the one that a pop"),
        (EnqueueBatch, {"topic": "jobs", "messages": [{"payload_text": "", "key": 5}]}, "messages is invalid: .*key"),
        (CreateTopic, {"topic": "jobs", "nosuch": 5}, "unknown field 'nosuch'; CreateTopic has topic, mode"),
    ],
)
def test_invalid_body_is_refused_with_the_contract_s_message(kind: Any, fields: Any, text: str) -> None:
    path = {"topic": "jobs"} if kind is PauseTopic else {}
    with pytest.raises(BadRequest, match=text):
        post(kind, path, **fields)


def test_invalid_query_is_refused_with_the_contract_s_message() -> None:
    with pytest.raises(BadRequest, match="limit must be an integer from 1 to 10000, got 0"):
        get(Peek, topic="jobs", limit="0")
    with pytest.raises(BadRequest, match="unknown field 'nosuch'; Peek has topic, limit"):
        get(Peek, topic="jobs", nosuch="0")
    with pytest.raises(BadRequest, match="message_id is required"):
        get(GetMessage, topic="jobs")
    with pytest.raises(BadName):
        get(Peek, topic="a b")


@pytest.mark.parametrize("body", [b"{", b"\xff", b"nope", b'{"topic": "jobs"} x', b"[" * 100_000])
def test_body_must_be_json(body: bytes) -> None:
    with pytest.raises(BadRequest):
        ROUTES[Pop].read({}, {}, body)


def test_body_must_be_an_object() -> None:
    with pytest.raises(BadRequest, match=r"Pop must be an object with named fields, got \[1\]"):
        ROUTES[Pop].read({}, {}, b"[1]")


# -- routes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "kind", "names"),
    [
        ("GET", "/v1/heaps/jobs", GetTopic, {"topic": "jobs"}),
        ("GET", "/v1/heaps/shop/jobs", GetTopic, {"topic": "shop/jobs"}),
        ("GET", "/v1/heaps/shop%2Fjobs", GetTopic, {"topic": "shop/jobs"}),
        ("GET", "/v1/stats", ListStats, {}),
        ("GET", "/v1/heaps/shop/jobs:stats", Stats, {"topic": "shop/jobs"}),
        ("POST", "/v1/heaps/shop/jobs:pause", PauseTopic, {"topic": "shop/jobs"}),
        ("POST", "/v1/heaps/jobs:groups/g:ack", GroupAck, {"topic": "jobs", "group": "g"}),
        ("GET", "/v1/schedules/shop/nightly", GetSchedule, {"name": "shop/nightly"}),
        ("DELETE", "/v1/sinks/a%2Fb%3Ac%25", ForgetSink, {"name": "a/b:c%"}),
        ("PATCH", "/v1/users/ann@example.org", UpdateUser, {"email": "ann@example.org"}),
        ("GET", "/v1/keys", ListKeys, {}),
    ],
)
def test_path_is_found_with_its_names(method: str, path: str, kind: Any, names: dict[str, str]) -> None:
    found = find(method, path)
    assert found is not None
    assert (found[0].kind, found[1]) == (kind, names)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/pop"), ("POST", "/v1/pop/"), ("GET", "/v1/heaps/a/b/c")])
def test_path_of_no_call_is_not_found(method: str, path: str) -> None:
    assert find(method, path) is None


# -- answers -----------------------------------------------------------------------------------------------------------


def shown(kind: type[Call[Any]], result: Any, **options: Any) -> Any:
    return json.loads(ROUTES[kind].encode(result, JsonOptions(**options)))


LEASED = Leased(
    "jobs",
    LeasedMessages(pack([ID]), pack([42]), [b'{"a": 1}'], pack([5]), pack([1], "B"), pack([1000]), pack([2500])),
    SUFFIX,
)


def test_popped_message_shows_ids_and_tokens_as_text_and_times_as_rfc_3339() -> None:
    assert shown(Pop, LEASED) == {
        "topic": "jobs",
        "messages": [
            {
                "message_id": ULID,
                "id": str(ID),
                "lease_token": "42",
                "payload": "eyJhIjogMX0=",
                "priority": 5,
                "attempts": 1,
                "enqueued_at": "1970-01-01T00:00:01Z",
                "deadline": "1970-01-01T00:00:02.500000Z",
                "partition": 0,
            }
        ],
    }
    assert shown(Pop, Leased("jobs")) == {"topic": "jobs", "messages": []}


def test_payload_is_shown_in_the_requested_form_or_in_base64() -> None:
    assert shown(Pop, LEASED, payload_as="json")["messages"][0]["payload_json"] == {"a": 1}
    assert shown(Pop, LEASED, payload_as="text")["messages"][0]["payload_text"] == '{"a": 1}'
    info = MessageInfo(id=1, topic="jobs", partition=0, state="ready", payload=b"\xff")
    for wanted in ("json", "text", "base64"):
        assert shown(GetMessage, info, payload_as=wanted)["payload"] == "/w=="
    none = MessageInfo(id=1, topic="jobs", partition=0, state="acked")
    assert not {"payload", "payload_text", "payload_json"} & shown(GetMessage, none, payload_as="json").keys()


def test_results_of_a_batch_are_one_per_message() -> None:
    result = EnqueueBatch.result(pack([ID, 0]), memoryview(b"\x01\x00"), [RowError(1, TopicNotFound("x"))], SUFFIX)
    first, second = shown(EnqueueBatch, result)["results"]
    assert first == {"message_id": ULID, "id": str(ID), "duplicate": True}
    assert second["error"]["error"] == "TopicNotFound"
    assert same(ROUTES[EnqueueBatch].decode(ROUTES[EnqueueBatch].encode(result)), result)
    assert shown(Enqueue, Enqueued(ID, id_suffix=SUFFIX)) == {
        "message_id": ULID,
        "id": str(ID),
        "duplicate": False,
    }


def test_call_without_a_result_answers_done() -> None:
    assert shown(PauseTopic, None) == {"done": True}
    assert ROUTES[PauseTopic].decode(b'{"done": true}') is None


def test_lost_leases_are_digits_and_deadlines_are_times() -> None:
    assert shown(Ack, Settled([ID])) == {"lost": [str(ID)]}
    assert shown(Extend, Extended(pack([1000, -1]), [ID])) == {
        "deadlines": ["1970-01-01T00:00:01Z", None],
        "lost": [str(ID)],
    }


def test_rows_of_a_fetch_have_their_partition() -> None:
    fetched = GroupFetch.result("jobs", 3, [0, 1], [])
    assert shown(GroupFetch, fetched) == {"topic": "jobs", "generation": 3, "partitions": [0, 1], "rows": []}


def test_unknown_fields_of_an_answer_are_ignored() -> None:
    assert ROUTES[Ack].decode(b'{"lost": ["5"], "newer": 1}') == Settled([5])


def test_lost_leases_raise_unless_the_caller_reads_them() -> None:
    command = Ack("jobs", LeaseKeys(pack([ID]), pack([7])))
    check_lost(command, Settled(), JsonOptions())
    check_lost(command, Settled([ID]), JsonOptions(tell_lost=True))
    with pytest.raises(LeaseLost) as lease:
        check_lost(command, Settled([ID]), JsonOptions())
    assert (lease.value.lost, lease.value.topic) == ([ID], "jobs")
    assert f"({ID})" in str(lease.value)
    _, options = ROUTES[Ack].read({}, {}, json.dumps({"topic": "jobs", "leases": [LEASE]}).encode())
    with pytest.raises(LeaseLost, match=f"had ended .{ULID}."):
        check_lost(command, Settled([ID]), options)
    _, options = ROUTES[Ack].read({}, {}, json.dumps({"topic": "jobs"} | LEASE).encode())
    with pytest.raises(LeaseLost, match=f"had ended .{ULID}."):
        check_lost(command, Settled([ID]), options)
    rows = [PartitionRows(3, pack([5, 6]))]
    with pytest.raises(DeliveryLost) as row:
        check_lost(GroupAck("jobs", "g", "m", rows, "s"), LostRows(rows), JsonOptions())
    assert (row.value.partitions, row.value.offsets) == ([3, 3], [5, 6])


@pytest.mark.parametrize("error", [LeaseLost([ID], "jobs"), BadRequest("no"), TopicNotFound("jobs")])
def test_error_survives_its_json(error: HeaplineError) -> None:
    again = read_error(error_response(error))
    assert same(again, error)
    if isinstance(error, LeaseLost):
        assert error_response(error).facts["lost"] == [str(ID)]


# -- the log -----------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text() | st.binary()
arrays = st.sampled_from(["i8", "u8", "u4", "u2", "u1", "f8"]).flatmap(
    lambda dtype: hnp.arrays(dtype, st.integers(0, 5), elements={"allow_nan": False} if dtype == "f8" else None)
)
values = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def frame_of(columns: dict[str, Any], payloads: list[bytes] | None = None) -> LogFrame:
    event = LogEvent(kind="enqueued", offset=3, row_count=2, columns=columns, payloads=payloads)
    return LogFrame(topic="jobs", partition=1, unit=7, offset=3, row_count=2, time_ms=5, wall_ms=-6, events=[event])


@settings(deadline=None)
@given(columns=st.dictionaries(st.text(), values, max_size=4), payloads=st.none() | st.lists(st.binary(), max_size=3))
def test_frame_survives_its_line(columns: dict[str, Any], payloads: list[bytes] | None) -> None:
    frame = frame_of(columns, payloads)
    line = ROUTES[ReadLog].encode(frame)
    assert b"\n" not in line
    assert same(ROUTES[ReadLog].decode(line), frame)


def test_numbers_of_64_bits_are_digits_in_strings() -> None:
    columns = {"ids": np.array([1 << 60]), "flags": np.array([7], dtype="u2")}
    (event,) = shown(ReadLog, frame_of(columns))["events"]
    assert event["columns"] == {
        "ids": {"dtype": "i8", "values": [str(1 << 60)]},
        "flags": {"dtype": "u2", "values": [7]},
    }


# -- OpenAPI -----------------------------------------------------------------------------------------------------------


def test_openapi_has_every_route_and_no_dangling_reference() -> None:
    document = openapi("2.0")
    operations = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert operations == {(route.method, route.path) for route in ROUTES.values()}
    text = json.dumps(document)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in document["components"]["schemas"]
    assert document["info"]["version"] == "2.0"


def test_openapi_says_what_a_request_may_have() -> None:
    document = openapi()
    schemas, paths = document["components"]["schemas"], document["paths"]
    assert schemas["Pop"]["properties"]["max_messages"] == {
        "type": "integer", "minimum": 1, "maximum": 100000, "default": 1,
    }  # fmt: skip
    assert schemas["Pop"]["required"] == ["topic"]
    assert schemas["Outgoing"]["oneOf"] == schemas["Enqueue"]["oneOf"]
    peek = {p["name"]: p for p in paths["/v1/peek"]["get"]["parameters"]}
    assert peek["topic"]["required"]
    assert peek["payload_as"]["in"] == "query"
    assert "428" in paths["/v1/heaps/{topic}:purge"]["post"]["responses"]
    assert "428" not in paths["/v1/pop"]["post"]["responses"]
    assert "201" in paths["/v1/heaps"]["post"]["responses"]
    assert "application/x-ndjson" in paths["/v1/log"]["get"]["responses"]["200"]["content"]


def test_every_route_has_a_summary_and_a_description() -> None:
    for path, methods in openapi()["paths"].items():
        for operation in methods.values():
            assert operation["summary"], path
            assert operation["description"], path


def test_outgoing_messages_keep_every_field() -> None:
    messages = [
        Outgoing(b"a", 5, "k", 1.5, None, {"h": "v"}, 9.0, 3, "once", "pending", 7, "f"),
        Outgoing(b"b", 0, deliver_at=datetime(2030, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC), seq=8),
    ]
    command = EnqueueBatch("jobs", pack_messages(messages), producer_id="p", epoch=1)
    _, _, query, body = ROUTES[EnqueueBatch].write(command)
    assert same(ROUTES[EnqueueBatch].read({}, query, body)[0], command)


#: Words of Python, which mean nothing to users of HTTP.
PYTHON = re.compile(r"\b(None|True|False|str|int|dict|datetime|timedelta|heapline|async)\b|\w\(")
BAD: list[Any] = [None, True, -1, 1 << 70, 0.5, "", "x" * 5000, [], {}, [1], [{}], {"a": 1}, "2020-01-01T00:00:00"]


@pytest.mark.parametrize("kind", ROUTES, ids=lambda kind: kind.__name__)
def test_refusals_have_no_words_of_python(kind: type[Call[Any]]) -> None:
    route = ROUTES[kind]
    names = [field.name for field in msgspec.structs.fields(route.request.twin)]
    path = dict.fromkeys(route.in_path, "jobs")
    usual = {"payload_text": "x", "topic": "jobs", "cron": "* * * * *", "name": "n", "group": "g", "ids": ["1"]}
    for name in names:
        for bad in BAD:
            given: dict[str, Any] = {n: v for n, v in usual.items() if n in names} | {name: bad}
            if name == "every":
                del given["cron"]
            query = {n: json.dumps(v).strip('"') for n, v in given.items()}
            try:
                route.read(path, *(({}, json.dumps(given).encode()) if route.has_body else (query, b"")))
            except HeaplineError as error:
                text = error_response(error).text
                assert not PYTHON.search(re.sub(r"'[^']*'", "", text)), text
