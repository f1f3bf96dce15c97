"""Scopes: the topics that a pattern covers, and how it is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.config import NAME
from heapline.contract.errors import BadRequest, PermissionDenied
from heapline.server.auth import NoAuthGuard, Principal, Right, Scope, parse_scope
from heapline.server.auth import principals as principals

NAMES = st.text("ab.-_9", min_size=1, max_size=6).filter(NAME.match)
PATTERNS = st.text("ab.-_9*", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("pattern", "topic", "covered"),
    [
        ("*", "jobs", True),
        ("*", "orders/new", True),
        ("orders/*", "orders/new", True),
        ("orders/*", "orders2/new", False),
        ("orders/*", "orders", False),
        ("orders/*", "new", False),
        ("jobs", "jobs", True),
        ("jobs", "default/jobs", True),
        ("default/jobs", "jobs", True),
        ("jobs", "jobs2", False),
        ("jobs", "orders/jobs", False),
        ("Jobs", "jobs", False),
        ("jobs-*", "jobs-eu", True),
        ("jobs-*", "orders/jobs-eu", False),
        ("*/jobs", "orders/jobs", True),
        ("*/jobs", "jobs", True),
        ("*a*b", "xaxb", True),
        ("a.c", "abc", False),
    ],
)
def test_pattern_covers(pattern: str, topic: str, covered: bool) -> None:
    assert Scope(pattern, frozenset(Right)).covers(topic) is covered


@pytest.mark.parametrize(("pattern", "covered"), [("*", True), ("*/*", True), ("default/*", False), ("a*", False)])
def test_only_a_scope_over_everything_covers_all_topics(pattern: str, covered: bool) -> None:
    assert Scope(pattern, frozenset(Right)).covers(None) is covered


def naive(pattern: str, text: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(naive(pattern[1:], text[n:]) for n in range(len(text) + 1))
    return bool(text) and pattern[0] == text[0] and naive(pattern[1:], text[1:])


@given(PATTERNS, PATTERNS, NAMES, NAMES)
def test_each_half_of_a_pattern_is_matched_with_its_half_of_the_name(ns: str, name: str, a: str, b: str) -> None:
    assert Scope(f"{ns}/{name}", frozenset(Right)).covers(f"{a}/{b}") is (naive(ns, a) and naive(name, b))


def test_pattern_of_many_stars_is_matched_quickly() -> None:
    assert not Scope("*a" * 40 + "b", frozenset(Right)).covers("a" * 120)


@given(PATTERNS, st.sets(st.sampled_from(list(Right)), min_size=1))
def test_scope_survives_formatting(pattern: str, actions: set[Right]) -> None:
    scope = Scope(pattern, frozenset(actions))
    assert parse_scope(str(scope)) == scope


@pytest.mark.parametrize(
    "text", ["", "jobs", ":produce", "jobs:", "jobs:fly", "a/b/c:produce", "a b:produce", "jobs[ab]:produce",
             "a?:admin", "/jobs:produce", "jobs/:produce", "jobs:produce,"]
)  # fmt: skip
def test_malformed_scope_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="produce"):
        parse_scope(text)


@pytest.mark.parametrize("action", list(Right))
def test_actions_do_not_include_one_another(action: Right) -> None:
    principal = Principal("key:1", (Scope("*", frozenset({action})),))
    assert [other for other in Right if principal.may(other, "jobs")] == [action]


def test_permission_denied_names_subject_right_and_topic() -> None:
    principal = Principal("key:1", (parse_scope("orders/*:produce"),))
    principal.check(Right.PRODUCE, "orders/new")
    with pytest.raises(PermissionDenied) as caught:
        principal.check(Right.CONSUME, "orders/new")
    assert caught.value.facts() == {"subject": "key:1", "action": "consume", "topic": "orders/new"}
    with pytest.raises(PermissionDenied, match="all topics"):
        principal.check(Right.PRODUCE, None)


async def test_no_auth_guard_accepts_every_caller() -> None:
    principal = await NoAuthGuard().authenticate(None)
    principal.check(Right.ADMIN, None)
    assert NoAuthGuard().is_valid(principal)


def test_names_that_no_topic_can_have_are_not_remembered() -> None:
    """Each name would be kept as long as the server runs, and can be as long as a request."""
    everywhere, one = (Principal("key:a", (parse_scope(text),)) for text in ("*:consume", "jobs:consume"))
    principals._grants.cache_clear()  # it may be full of other tests' names
    before = 0
    for n in range(3):
        assert everywhere.may(Right.CONSUME, f"{n}" * 1000)
        assert not one.may(Right.CONSUME, f"{n}" * 1000)
    assert principals._grants.cache_info().currsize == before
    assert one.may(Right.CONSUME, "jobs")
    assert principals._grants.cache_info().currsize == before + 1
