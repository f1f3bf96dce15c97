"""Leases (holder and deadline of each message) against a dict."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline import accelerator
from heapline.core import leases
from heapline.core.events import Grant
from heapline.core.leases import DEADLINE, POSITION, LeaseTable

pytestmark = pytest.mark.usefixtures("both_accelerators")
COMMANDS = st.lists(
    st.tuples(st.sampled_from(["grant", "extend", "take", "look", "thaw"]), st.integers(1, 40), st.integers(0, 99)),
    max_size=40,
)


def grant(table: LeaseTable, ids: list[int], token: int, deadline: int, request: str | None = None) -> None:
    table.grant(ids, token, [id << 20 for id in ids], [0] * len(ids), Grant(len(ids), deadline, "w", request), 0)


def thaw(table: LeaseTable) -> LeaseTable:
    return LeaseTable.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(table.to_state())))


@given(COMMANDS)
def test_deadlines_are_those_of_current_leases(commands: list[tuple[str, int, int]]) -> None:
    table, deadlines, token = LeaseTable(), dict[int, int](), 0
    for command, size, time in commands:
        held = sorted(deadlines)[:size]
        if command == "grant":
            ids = [id for id in range(size) if id not in deadlines]
            if ids:
                grant(table, ids, token, time)
                deadlines.update(dict.fromkeys(ids, time))
                token += len(ids)
        elif command == "extend":
            later = [max(deadlines[id], time + id % 3) for id in held]
            table.extend(held, later)
            deadlines.update(zip(held, later, strict=True))
        elif command == "take":
            table.take(held)
            for id in held:
                del deadlines[id]
        elif command == "thaw":
            table = thaw(table)
        assert {id: lease[DEADLINE] for id, lease in zip(table.by_id, table.by_id.values(), strict=True)} == deadlines
        if command == "look":
            assert table.next_deadline() == min(deadlines.values(), default=None)
        due = {id for id, deadline in deadlines.items() if deadline <= time}
        assert set(table.overdue(time, 1000)) == due
        some = table.overdue(time, size)
        assert len(some) == len(set(some)) == min(size, len(due))
        assert set(some) <= due
    assert table.next_deadline() == min(deadlines.values(), default=None)


def test_scan_of_a_long_grant_resumes_where_it_stopped() -> None:
    """Acks remove rows from the front of a grant; the search for its deadline does not restart there each time."""
    table = LeaseTable()
    grant(table, list(range(1000)), 0, 50)
    grant(table, [1000], 1000, 60)
    for start in range(0, 1000, 100):
        table.take(range(start, start + 100))
        assert table.next_deadline() == (50 if start < 900 else 60)
    # The same messages again, due earlier than the rest of their first grant.
    grant(table, [3], 1001, 55)
    assert table.next_deadline() == 55
    assert table.overdue(55, 10) == [3]


def test_tokens_distinguish_leases_of_one_message() -> None:
    table = LeaseTable()
    grant(table, [1], 7, 50)
    assert table.holds(1, 7)
    table.take([1])
    grant(table, [1], 8, 50)
    assert not table.holds(1, 7)
    assert table.holds(1, 8)


def test_repeated_request_returns_only_current_leases() -> None:
    table = LeaseTable()
    grant(table, [1, 2, 3], 10, 50, "r")
    table.take([2])
    grant(table, [2], 13, 50)
    assert table.request("r") == [1, 3]
    assert thaw(table).request("r") == [1, 3]
    assert table.request("s") == []


def test_oldest_requests_are_forgotten_first() -> None:
    table = LeaseTable()
    for number in range(leases.REQUESTS_MAX):
        grant(table, [number], number, 50, f"r{number}")
    table.take([0])
    grant(table, [0], 1 << 20, 50, "r0")  # the name is used again, so it is now the newest
    grant(table, [1 << 20], 1 << 21, 50, "new")
    assert table.request("r0") == [0]
    assert table.request("r1") == []
    assert table.request("r2") == [2]


def test_moved_record_keeps_the_attempts_of_its_lease() -> None:
    table = LeaseTable()
    table.grant([1], 0, [(5 << 20) | 3], [0], Grant(1, 50, None, None), 0)
    table.replace_positions({1: 9 << 20, 2: 8 << 20})
    assert table.by_id[1][POSITION] == (9 << 20) | 3
    assert len(table) == 1


def test_slices_of_an_expiring_large_grant_do_not_scan_all_of_it() -> None:
    class Counted(accelerator.twins["LeaseMap"]):  # type: ignore[misc]
        looks = 0

        def get(self, *key: Any) -> Any:
            Counted.looks += 1
            return super().get(*key)

    table = LeaseTable()
    grant(table, list(range(10_000)), 0, 5)
    table.by_id = Counted(zip(table.by_id, table.by_id.values(), strict=True))
    while found := table.overdue(9, 100):
        assert len(found) == 100
        table.take(found)
    assert len(table) == 0
    assert Counted.looks < 5 * 10_000, "each slice reads its own rows and those of the previous one"
