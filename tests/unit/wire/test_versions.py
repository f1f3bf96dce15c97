"""Releases can mix: a client accepts the answers of a newer server, and errors name what a server lacks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from heapline.contract.call import Call, Page
from heapline.contract.config import Aging, Backoff, TopicConfig
from heapline.contract.errors import BadRequest, HeaplineError, UnavailableError
from heapline.contract.leases import Pop
from heapline.contract.message import LogFrame, TopicInfo
from heapline.contract.topics import CreateTopic, GetTopic, ListTopics
from heapline.wire import codec, error_codes
from heapline.wire.json import ROUTES
from heapline.wire.protobuf import response_of
from tests.unit.wire.calls import ALL_CALLS, commands, results, same

ADDED = {"added": {"in": ["a later release", 1, None]}}


def newer(value: Any) -> Any:
    """Return plain values as a later release might send them: every struct in them has one more field."""
    if isinstance(value, HeaplineError):
        return error_codes.describe(value) | ADDED
    if isinstance(value, Struct):
        config = value.__struct_config__
        tag = {} if config.tag is None else {config.tag_field: config.tag}
        fields = {name: newer(getattr(value, name)) for name in value.__struct_fields__}
        return tag | fields | ADDED
    if isinstance(value, list | tuple):
        return [newer(item) for item in value]
    if isinstance(value, dict):
        return {key: newer(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("kind", ALL_CALLS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_fields_added_to_answers_are_ignored(kind: type[Call[Any]], data: st.DataObject) -> None:
    result = data.draw(
        results(kind).filter(lambda drawn: drawn is not None) if kind.result is not type(None) else st.none()
    )
    if result is None:
        assert codec.decode_result(codec.encode(ADDED), kind) is None
    elif isinstance(result, LogFrame):
        plain = msgspec.msgpack.decode(codec.encode_result(result))
        plain["events"] = [event | ADDED for event in plain["events"]]
        assert same(codec.decode_result(codec.encode(plain | ADDED), kind), result)
    else:
        assert same(codec.decode_result(codec.encode(newer(result)), kind), result)


def test_setting_that_a_newer_server_added_does_not_hide_the_others_over_http() -> None:
    body = {"name": "jobs", "incarnation": 1, "config": {"k": 3, "backoff": {"base": 2.0} | ADDED} | ADDED} | ADDED
    info = ROUTES[GetTopic].decode(msgspec.json.encode(body))
    assert (info.name, info.config) == ("jobs", TopicConfig(k=3, backoff=Backoff(base=2.0)))


#: A topic of a server whose settings have wider bounds and more choices than here.
ELSEWHERE: dict[str, Any] = {
    "k": 1 << 40,
    "partitions": 65_536,
    "strategy": "newest",
    "partition_weights": {2000: 1e6},
    "ordering": Aging(1e9),
    "max_payload_bytes": 1 << 30,
    "tick": 1e-6,
    "backoff": Backoff(base=-1.0),
}


def topic_elsewhere() -> TopicInfo:
    return TopicInfo(name="jobs", incarnation=1, config=msgspec.structs.replace(TopicConfig(), **ELSEWHERE))


@pytest.mark.parametrize("wire", ["native", "http", "grpc"])
def test_settings_of_a_server_with_other_bounds_can_be_read(wire: str) -> None:
    info = topic_elsewhere()
    if wire == "native":
        answer = codec.decode_result(codec.encode_result(info), GetTopic)
    elif wire == "http":
        answer = ROUTES[GetTopic].decode(ROUTES[GetTopic].encode(info))
    else:
        answer = response_of(GetTopic).unpack(response_of(GetTopic).pack(info))
    assert answer == info


def test_pages_of_a_server_with_other_bounds_can_be_read_over_http() -> None:
    page = Page([topic_elsewhere()], "next")
    assert ROUTES[ListTopics].decode(ROUTES[ListTopics].encode(page)) == page


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name != "backoff"])
def test_requests_keep_the_bounds_of_settings(name: str) -> None:
    settings = msgspec.to_builtins({name: ELSEWHERE[name]})
    body = {"topic": "jobs", "config": settings}
    with pytest.raises(BadRequest):
        codec.decode_call(codec.encode(body), CreateTopic)
    with pytest.raises(BadRequest):
        ROUTES[CreateTopic].read({}, {}, msgspec.json.encode({"topic": "jobs"} | settings))


def test_answer_with_values_of_a_wrong_type_is_refused() -> None:
    for wrong in ({"name": 7}, {"config": {"k": "many"}}, {"config": {"strategy": 3}}, {"config": []}):
        body = {"name": "jobs", "incarnation": 1, "config": {}} | wrong
        with pytest.raises(UnavailableError, match="answer to GetHeap cannot be decoded") as refused:
            codec.decode_result(codec.encode(body), GetTopic)
        assert isinstance(refused.value.__cause__, msgspec.ValidationError)
    with pytest.raises(UnavailableError, match="answer to GetHeap cannot be decoded"):
        codec.decode_result(codec.encode({"name": "jobs"} | ADDED), GetTopic)


@pytest.mark.parametrize("kind", ALL_CALLS, ids=lambda kind: kind.__name__)
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_field_that_this_server_does_not_know_is_refused_by_name(kind: type[Call[Any]], data: st.DataObject) -> None:
    plain = msgspec.msgpack.decode(codec.encode(data.draw(commands(kind))))
    with pytest.raises(BadRequest, match="unknown field 'added'"):
        codec.decode_call(codec.encode(plain | ADDED), kind)


def test_call_without_fields_that_a_later_release_added_has_their_defaults() -> None:
    assert codec.decode_call(codec.encode({"topic": "jobs"}), Pop) == Pop("jobs")
