"""Every error crosses the wire and is rebuilt as the same class."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from heapline.contract import errors
from heapline.contract.batches import PrepareBatch
from heapline.contract.dead_letters import DeleteDeadLetters
from heapline.contract.errors import HeaplineError
from heapline.contract.groups import position
from heapline.contract.messages import Enqueue
from heapline.contract.topics import CreateTopic, TopicSettings
from heapline.wire import error_codes

EXAMPLES = {"str": "x", "int": 7, "list[int]": [1, 1 << 62], "list[str]": ["a", "é"]}


def example(kind: type[HeaplineError]) -> HeaplineError:
    if kind.__init__ is Exception.__init__ or "__init__" not in vars(kind):
        return kind("something")
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    values: list[Any] = [EXAMPLES[p.annotation] for p in parameters]
    return kind(*values)


@pytest.mark.parametrize("kind", error_codes.tree(), ids=lambda kind: kind.__name__)
def test_error_is_rebuilt_with_its_class_facts_and_text(kind: type[HeaplineError]) -> None:
    error = example(kind)
    again = error_codes.from_metadata(error_codes.to_metadata(error), error_codes.codes_of(kind).grpc, str(error))
    assert type(again) is kind
    assert again.facts() == error.facts()
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", error_codes.tree(), ids=lambda kind: kind.__name__)
def test_error_has_a_canonical_code_and_an_http_status(kind: type[HeaplineError]) -> None:
    grpc_code, http = error_codes.codes_of(kind)
    assert hasattr(grpc.StatusCode, grpc_code)
    assert 400 <= http < 600
    assert grpc_code not in ("OK", "INTERNAL"), "INTERNAL is for exceptions that are not Heapline's own"


def test_tree_has_every_class_of_errors_py() -> None:
    named = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeaplineError)}
    assert set(error_codes.tree()) == named


def test_classes_have_the_documented_codes() -> None:
    wanted = {
        errors.BadRequest: "INVALID_ARGUMENT", errors.LeaseLost: "FAILED_PRECONDITION", errors.BatchInDoubt: "ABORTED",
        errors.TopicNotFound: "NOT_FOUND", errors.Unauthenticated: "UNAUTHENTICATED", errors.Closed: "UNAVAILABLE",
        errors.PermissionDenied: "PERMISSION_DENIED", errors.ResourceExhausted: "RESOURCE_EXHAUSTED",
        errors.TopicReloading: "UNAVAILABLE", errors.JournalCorrupt: "DATA_LOSS",
        errors.DeadlineExceeded: "DEADLINE_EXCEEDED", errors.Unsupported: "UNIMPLEMENTED",
    }  # fmt: skip
    assert {kind: error_codes.codes_of(kind).grpc for kind in wanted} == wanted


def test_unsupported_call_is_501_on_http() -> None:
    assert error_codes.codes_of(errors.Unsupported).http == 501
    assert type(error_codes.of_code("UNIMPLEMENTED", "no such method")) is errors.Unsupported


def test_long_list_of_lost_leases_is_cut_to_fit_metadata() -> None:
    error = errors.LeaseLost([(1 << 62) + i for i in range(10_000)], "jobs")
    data = error_codes.to_metadata(error)
    assert len(data) <= 4096
    again = error_codes.from_metadata(data, "FAILED_PRECONDITION", "")
    assert isinstance(again, errors.LeaseLost)
    assert again.lost == error.lost[: error_codes.LIST_MAX]


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b'{"error": "Newer", "text": "t"}', b'{"error": "LeaseLost", "facts": {}}',
             b'{"error": "LeaseLost", "facts": 3}', b'{"error": 3}'],
)  # fmt: skip
def test_unknown_details_fall_back_to_the_class_of_the_code(data: bytes) -> None:
    assert type(error_codes.from_metadata(data, "ABORTED", "t")) is errors.ConflictError


def test_subclass_from_elsewhere_is_described_as_its_ancestor() -> None:
    class Local(errors.UnavailableError):
        pass

    assert error_codes.describe(Local("later"))["error"] == "UnavailableError"


def test_every_branch_can_be_raised_and_printed() -> None:
    for code in [*error_codes.BRANCHES, "SOMETHING"]:
        error = error_codes.of_code(code, "text")
        assert str(error) == "text"
        error.facts()


@pytest.mark.parametrize(
    "error",
    [
        errors.JournalCorrupt("/srv/data/topics/default/jobs.1/00000001.seg", 4096, "cut"),
        errors.RecordCorrupt("jobs", "01J", "/srv/data/00000001.seg", 7),
        errors.TopicReloading("jobs", "[Errno 5] Input/output error: '/srv/data/00000001.seg'"),
        errors.UnknownFormat("/srv/data/catalog", 9),
    ],
)
def test_paths_of_the_server_are_not_described(error: HeaplineError) -> None:
    described = error_codes.describe(error)
    assert "/srv" not in json.dumps(described)
    assert type(error_codes.rebuild(described)) is type(error)
    assert "00000001.seg" in described["text"] or "catalog" in described["text"]


NOON = "got 2030; use, for example, 2030-01-31T12:00:00Z"


@pytest.mark.parametrize(
    ("error", "http", "grpc"),
    [
        (errors.TopicNotFound("jobs"), "create it with POST /v1/heaps", "create it with MakeHeap"),
        (errors.TopicExists("update_topic", ["k"]), "PATCH /v1/heaps/update_topic,", "UpdateHeapConfig,"),
        (errors.ScheduleNotFound("s"), "POST /v1/schedules", "CreateSchedule"),
        (errors.GroupNotFound("jobs", "create_group"), "POST /v1/heaps/jobs:groups,", "CreateGroup,"),
        (errors.ReplayNotFound("r"), "GET /v1/replays shows", "ListReplays shows"),
        (errors.ReplayExists("r"), "(GET /v1/replays/r shows", "(GetReplay shows"),
        (errors.Unsupported("Purge", "queue"), "GET /v1/describe", "Describe"),
        (errors.Closed(), "the server's broker is closed; retry", "the server's broker is closed; retry"),
        (errors.BadRequest("at must have a time zone, got 2030; use, for example, datetime.now(UTC)"), *[NOON] * 2),
        (errors.BadRequest("dlq must be True or False, got None"), "be true or false, got null", "got null"),
        (errors.BadRequest("key must be a string or None, got True"), "a string or null, got true", "got true"),
    ],
)
def test_advice_suits_the_interface_and_is_python_for_a_python_client(
    error: errors.HeaplineError, http: str, grpc: str
) -> None:
    described = error_codes.describe(error)
    text = error_codes.advise(described, "http")
    assert http in text
    assert grpc in error_codes.advise(described, "grpc")
    assert error_codes.advise({**described, "text": text}, "http", is_back=True) == str(error)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Enqueue("jobs", b"", epoch=1),
        lambda: DeleteDeadLetters("jobs"),
        lambda: PrepareBatch("b", "1", []),
        lambda: position("start", object()),
        lambda: CreateTopic("jobs", TopicSettings(ordering=5)),
        lambda: CreateTopic("jobs", TopicSettings(backoff=5)),
    ],
)
def test_errors_of_commands_have_no_advice_for_one_language(make: Callable[[], object]) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        make()
    assert not re.search(r"heapline\.[A-Z]|datetime|\w=\w|\[\]|\ba [AEIOU]", str(caught.value))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.TopicNotFound("jobs"), "create it with the button on the page Topics"),
        (errors.TopicExists("jobs", ["k"]), "change them with the topic's tab Config, or"),
        (errors.ReplayExists("r"), "(the page Pipeline shows"),
        (errors.BadRequest("key must be a string or None, got True"), "a string or null, got true"),
    ],
)
def test_advice_of_the_dashboard_names_its_pages(error: errors.HeaplineError, said: str) -> None:
    assert said in error_codes.advise(error_codes.describe(error), "page")


def test_advice_of_an_error_without_its_facts_is_unchanged() -> None:
    newer = {"error": "TopicNotFound", "facts": {}, "text": "create it with create_topic('jobs')"}
    assert error_codes.advise(newer, "http") == newer["text"]
    assert error_codes.advise({**newer, "error": "NoSuchError"}, "grpc") == newer["text"]
