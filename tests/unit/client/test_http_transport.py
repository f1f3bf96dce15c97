"""Unexpected responses to an HTTP client."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from heapline.client.transports.http import heapline_error
from heapline.contract import errors
from heapline.wire.error_codes import codes_of, tree
from heapline.wire.json import error_response

FACTS = {"size": 5, "limit": 3, "epoch": 1, "current": 2, "seq": 7, "answered_below": 9, "offset": 4, "version": 3}
FACTS |= {"differing": ["k"], "lost": [1 << 60, 7]}  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_every_error_is_raised_as_its_own_class(kind: type[errors.HeaplineError]) -> None:
    error = kind(*(FACTS.get(name, name) for name in kind.fields))
    body = msgspec.json.encode(error_response(error))
    again = heapline_error(codes_of(kind).http, body)
    assert type(again) is kind
    assert again.facts() == error.facts()
    assert str(again).startswith(str(error))


def test_numbers_too_large_for_javascript_are_strings_in_the_facts() -> None:
    reported = msgspec.json.decode(msgspec.json.encode(error_response(errors.LeaseLost([1 << 60], "jobs"))))
    assert reported["facts"]["lost"] == [str(1 << 60)]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.RequestError), (401, errors.Unauthenticated), (404, errors.RequestError),
        (409, errors.ConflictError), (429, errors.UnavailableError), (500, errors.HeaplineError),
        (502, errors.UnavailableError), (503, errors.UnavailableError), (504, errors.DeadlineExceeded),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content", [b"", b"<html>proxy</html>", b"[1]", b'{"a": 1}', b"\xff"])
def test_response_of_a_proxy_is_reported_with_its_status(status: int, kind: type[Exception], content: bytes) -> None:
    assert type(heapline_error(status, content)) is kind


def test_broker_over_http_needs_neither_grpc_nor_protobuf() -> None:
    code = "import sys, heapline.client.transports.http; print([m for m in ('grpc', 'google') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_importing_heapline_needs_no_httpx() -> None:
    code = "import sys, heapline; print('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
