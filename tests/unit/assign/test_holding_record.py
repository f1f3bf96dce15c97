"""The checker of worker pools' records finds every violation and nothing else."""

from __future__ import annotations

from typing import Any

from tests.integration.holding_record import Record, Span, overlapping, overlaps, seen_by_two


def lease(t: float, ends_at: float, session: str = "s") -> dict[str, Any]:
    return {"kind": "lease", "t": t, "worker": "w", "session": session, "ends_at": ends_at}


def add(t: float, fence: int, id: str = "p") -> dict[str, Any]:
    return {"kind": "add", "t": t, "partitions": {id: fence}}


def drop(t: float, id: str = "p") -> dict[str, Any]:
    return {"kind": "drop", "t": t, "partitions": [id]}


def saw(t: float, *ids: str, before: float | None = None) -> dict[str, Any]:
    return {"kind": "saw", "t": t, "before": t if before is None else before, "partitions": list(ids)}


def spans(*lines: dict[str, Any]) -> list[tuple[Span, ...]]:
    return [holding.spans for holding in Record("one", list(lines)).holdings()]


def test_killed_process_holds_until_its_last_lease_ends() -> None:
    assert spans(lease(0, 6), add(1, 1), lease(2, 8)) == [(Span(1, 8),)]


def test_nothing_is_held_between_an_ended_lease_and_a_later_renewal() -> None:
    assert spans(lease(0, 6), add(1, 1), lease(9, 15), drop(10)) == [(Span(1, 6), Span(9, 10))]


def test_new_session_holds_nothing_of_the_previous_one() -> None:
    assert spans(lease(0, 6), add(1, 1), lease(3, 9, "t"), lease(8, 14, "t")) == [(Span(1, 6),)]


def test_repeated_hook_adds_nothing() -> None:
    assert spans(lease(0, 6), add(1, 1), add(2, 1), drop(3)) == [(Span(1, 3),)]


def test_adjacent_leases_are_joined() -> None:
    assert overlaps(Span(1, 9), [Span(0, 3), Span(2, 5), Span(7, 12)]) == [Span(1, 5), Span(7, 9)]


def test_consecutive_holders_do_not_overlap() -> None:
    one = Record("one", [lease(0, 6), add(1, 1), drop(2)])
    two = Record("two", [lease(0, 9), add(2.1, 2)])
    assert overlapping([one, two]) == []
    assert seen_by_two([one, two]) == []


def test_two_holders_are_found() -> None:
    one = Record("one", [lease(0, 6), add(1, 1)])
    two = Record("two", [lease(0, 9), add(5.9, 2)])
    assert len(overlapping([one, two])) == 1


def test_two_holders_are_found_even_with_another_span_between() -> None:
    one = Record("one", [lease(0, 20), add(1, 1)])
    two = Record("two", [lease(0, 9), add(2, 2), drop(3)])
    three = Record("three", [lease(0, 9), add(4, 3), drop(5)])
    assert len(overlapping([one, two, three])) == 2


def test_falling_fence_is_found() -> None:
    one = Record("one", [lease(0, 6), add(1, 5), drop(2)])
    two = Record("two", [lease(0, 9), add(3, 4), drop(4)])
    assert len(overlapping([one, two])) == 1


def test_sample_while_another_worker_holds_is_found() -> None:
    one = Record("one", [lease(0, 6), add(1, 1), drop(4)])
    two = Record("two", [saw(3, "p"), saw(5, "p"), saw(3.5, "p", before=2), saw(3, "q")])
    assert len(seen_by_two([one, two])) == 1
