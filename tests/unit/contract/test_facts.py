"""The facts that a cluster's router reads agree with the fields and the result of each call."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from heapline.contract import broker as _every_call  # noqa: F401  (registers the calls)
from heapline.contract.call import CALLS, HERE, Call, Count, Page
from heapline.contract.inspection import TopicSeries
from heapline.wire.frames import Headers

KINDS = list(CALLS.values())
BY_FIELD = {"topic": "topic", "batch_id": "batch"}
BY_NAME = {"topic": "topic", "schedule": "schedule", "replay": "replay"}


def routed_by(kind: type[Call[Any]]) -> str:
    """Return the route implied by the first required field of a call, which names its subject."""
    first = next((field for field in msgspec.structs.fields(kind) if field.required), None)
    if kind.facts.feature == "auth" or first is None:
        return ""
    hint = get_type_hints(kind, include_extras=True)[first.name]
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    names = [meta.extra["name"] for meta in metas if meta.extra and "name" in meta.extra]
    return BY_NAME[names[0]] if names else BY_FIELD.get(first.name, "sink")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_call_is_routed_by_the_name_of_its_subject(kind: type[Call[Any]]) -> None:
    if expected := routed_by(kind):
        assert kind.facts.route == expected
    else:
        assert kind.facts.route in ("system", "all")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_answer_of_several_shards_is_merged_by_its_type(kind: type[Call[Any]]) -> None:
    facts = kind.facts
    assert (facts.route == "all") == (facts.merge is not None)
    if facts.feature != "auth" and get_origin(kind.result) is Page and not routed_by(kind):
        assert facts.merge == "pages"  # a list of everything is in all shards
    if facts.merge is not None:
        expected = "pages" if get_origin(kind.result) is Page else {Count: "sum", TopicSeries: "series"}[kind.result]
        assert facts.merge == expected


def test_calls_on_the_same_noun_have_the_same_route() -> None:
    replays = {kind.facts.rpc: kind.facts.route for kind in KINDS if kind.facts.rpc.endswith("Replay")}
    assert {replays[f"{verb}Replay"] for verb in ("Start", "Get", "Cancel")} == {"replay"}


def test_client_cannot_claim_that_its_call_was_forwarded() -> None:
    assert HERE.forwarded is False
    assert not {"forwarded", "principal", "leases_max"} & set(Headers.__struct_fields__)
