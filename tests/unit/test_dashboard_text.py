"""Numbers, tracebacks, payloads and addresses as pages show them, without a server."""

from __future__ import annotations

import doctest

import pytest

from heapline.contract.errors import BadRequest
from heapline.dashboard import render, topic_rows
from heapline.dashboard.message_life import folded
from heapline.dashboard.page import Place, element_id, find
from heapline.dashboard.pages import SECTIONS
from heapline.dashboard.pages.dead_letters import first_line
from heapline.dashboard.pages.messages import payload_as, views_of

TRACEBACK = """Traceback (most recent call last):
  File "/srv/venv/lib/python3.13/site-packages/heapline/worker.py", line 210, in _run
    return await handler(message)
  File "/srv/app/tasks.py", line 41, in deliver
    response.raise_for_status()
httpx.HTTPStatusError: 502"""


def test_examples_of_numbers_and_durations_hold() -> None:
    for module in (render, topic_rows):
        assert doctest.testmod(module).failed == 0
        assert doctest.testmod(module).attempted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (10_000, "10 k"), (999_449, "999 k"), (999_600, "1 M"), (5_200_000_000_000, "5.2 T")]
)
def test_large_counts_have_at_most_three_digits_and_a_unit(number: int, text: str) -> None:
    assert render.count(number).replace("\xa0", " ") == text


def test_traceback_folds_frames_of_libraries_only() -> None:
    parts = folded(TRACEBACK)
    assert [part.is_folded for part in parts] == [False, True, False]
    assert "return await handler" in parts[1].text
    assert parts[2].text.splitlines()[-1] == "httpx.HTTPStatusError: 502"
    assert "\n".join(part.text for part in parts) == TRACEBACK


def test_reason_of_a_row_is_the_line_that_says_most() -> None:
    assert first_line(TRACEBACK) == "httpx.HTTPStatusError: 502"
    assert first_line("timed out\nafter 30 s") == "timed out"
    assert first_line(None) == "no reason given"


@pytest.mark.parametrize(
    ("payload", "views"),
    [
        (b'{"a": 9007199254740993}', ("json", "text", "hex")),
        (b"hello", ("text", "hex")),
        (b"\x00\x01", ("hex", "text")),
        (b"\xff\xfe", ("hex",)),
    ],
)
def test_payload_is_first_shown_in_its_best_form(payload: bytes, views: tuple[str, ...]) -> None:
    assert views_of(payload) == views
    for view in views:
        assert payload_as(view, payload)


def test_large_integers_of_json_payloads_stay_exact() -> None:
    assert "9007199254740993" in payload_as("json", b'{"a": 9007199254740993}')


def test_large_json_payload_is_shown_as_far_as_it_is_read() -> None:
    payload = b"[" + b"1," * 200_000 + b"1]"
    for view in views_of(payload):
        assert payload_as(view, payload)


def test_place_has_one_key_whatever_the_order_of_its_query() -> None:
    first, second = find("/topics", "sort=ready&q=a"), find("/topics", "q=a&sort=ready")
    assert first is not None
    assert second is not None
    assert first[1].key == second[1].key
    assert first[1].link(q=None) == "/topics?sort=ready"


def test_address_that_is_too_long_is_refused() -> None:
    with pytest.raises(BadRequest, match="too long"):
        find("/topics", "q=" + "x" * 3000)


def test_link_escapes_what_users_named() -> None:
    place = Place('/topics/a b/"<c>', {}, {"q": "&=#"})
    assert place.link() == "/topics/a%20b/%22%3Cc%3E?q=%26%3D%23"
    assert element_id("t", "a", "b") != element_id("t", "ab")


def test_every_section_has_a_page() -> None:
    for section in SECTIONS:
        found = find(section.path, "")
        assert found is not None
        assert found[0].section == section.name
