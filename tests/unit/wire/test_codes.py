"""Every error crosses the wire and comes back as itself."""

from __future__ import annotations

import inspect
import json
from typing import Any

import grpc
import pytest

from heapline import errors
from heapline.errors import HeaplineError
from heapline.wire import codes

EXAMPLES = {"str": "x", "int": 7, "list[int]": [1, 1 << 62], "list[str]": ["a", "é"]}


def example(kind: type[HeaplineError]) -> HeaplineError:
    if kind.__init__ is Exception.__init__ or "__init__" not in vars(kind):
        return kind("something")
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    values: list[Any] = [EXAMPLES[p.annotation] for p in parameters]
    return kind(*values)


@pytest.mark.parametrize("kind", codes.tree(), ids=lambda kind: kind.__name__)
def test_error_comes_back_as_the_same_class_with_the_same_facts_and_text(kind: type[HeaplineError]) -> None:
    error = example(kind)
    again = codes.from_metadata(codes.to_metadata(error), codes.codes_of(kind).grpc, str(error))
    assert type(again) is kind
    assert again.facts() == error.facts()
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", codes.tree(), ids=lambda kind: kind.__name__)
def test_error_has_a_canonical_code_and_an_http_status(kind: type[HeaplineError]) -> None:
    grpc_code, http = codes.codes_of(kind)
    assert hasattr(grpc.StatusCode, grpc_code)
    assert 400 <= http < 600
    assert grpc_code not in ("OK", "INTERNAL"), "INTERNAL is for what is not Heapline's own"


def test_tree_is_all_of_errors_py() -> None:
    named = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeaplineError)}
    assert set(codes.tree()) == named


def test_codes_are_the_ones_that_the_service_promises() -> None:
    wanted = {
        errors.BadRequest: "INVALID_ARGUMENT", errors.LeaseLost: "FAILED_PRECONDITION", errors.BatchInDoubt: "ABORTED",
        errors.TopicNotFound: "NOT_FOUND", errors.Unauthenticated: "UNAUTHENTICATED", errors.Closed: "UNAVAILABLE",
        errors.PermissionDenied: "PERMISSION_DENIED", errors.ResourceExhausted: "RESOURCE_EXHAUSTED",
        errors.TopicReloading: "UNAVAILABLE", errors.JournalCorrupt: "DATA_LOSS",
        errors.DeadlineExceeded: "DEADLINE_EXCEEDED",
    }  # fmt: skip
    assert {kind: codes.codes_of(kind).grpc for kind in wanted} == wanted


def test_many_lost_leases_are_cut_to_what_metadata_carries() -> None:
    error = errors.LeaseLost([(1 << 62) + i for i in range(10_000)], "jobs")
    data = codes.to_metadata(error)
    assert len(data) <= 4096
    again = codes.from_metadata(data, "FAILED_PRECONDITION", "")
    assert isinstance(again, errors.LeaseLost)
    assert again.lost == error.lost[: codes.LIST_MAX]


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b'{"error": "Newer", "text": "t"}', b'{"error": "LeaseLost", "facts": {}}',
             b'{"error": "LeaseLost", "facts": 3}', b'{"error": 3}'],
)  # fmt: skip
def test_details_that_say_nothing_known_leave_what_the_code_says(data: bytes) -> None:
    assert type(codes.from_metadata(data, "ABORTED", "t")) is errors.ConflictError


def test_subclass_made_elsewhere_is_told_as_what_errors_py_knows() -> None:
    class Local(errors.UnavailableError):
        pass

    assert codes.describe(Local("later"))["error"] == "UnavailableError"


def test_every_branch_can_be_raised_and_printed() -> None:
    for code in [*codes.BRANCHES, "SOMETHING"]:
        error = codes.of_code(code, "text")
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
def test_directories_of_the_server_are_not_told(error: HeaplineError) -> None:
    told = codes.describe(error)
    assert "/srv" not in json.dumps(told)
    assert type(codes.rebuild(told)) is type(error)
    assert "00000001.seg" in told["text"] or "catalog" in told["text"]
