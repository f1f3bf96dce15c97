"""Slots: which one is open, and up to which positions closed ones are known to be empty."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heapline.sql.layout import (
    COLD_SLOTS,
    ENDED_MS,
    ENDED_SLOTS,
    LEASE_SLOTS,
    POP_SLOTS,
    READY_SLOTS,
    START,
    Floors,
    Layout,
    Place,
    Turns,
    by_slot,
)

HERE = Place(5, 6, 7)


def test_leases_are_grouped_by_the_slot_in_their_token() -> None:
    assert by_slot([1, 2, 3], [8 * 100 + 3, 8 * 5, 8 * 7 + 3]) == {3: ([1, 3], [803, 59]), 0: ([2], [40])}


@given(turn=st.integers(0, 1 << 40), now=st.integers(0, 1 << 45))
def test_open_slots_follow_from_turns_and_time(turn: int, now: int) -> None:
    layout = Layout(now, turn, turn)
    assert (layout.open("ready"), layout.open("lease")) == (turn % READY_SLOTS, turn % LEASE_SLOTS)
    assert layout.open_ended == now // ENDED_MS % ENDED_SLOTS
    assert f"ready_{turn % READY_SLOTS} " in layout._replace(ready_live=0).claim()
    assert f"ready_{turn % READY_SLOTS} " in layout.insert("insert_ready")


@given(live=st.sets(st.integers(0, POP_SLOTS - 1)), turn=st.integers(0, 1000))
def test_claim_reads_live_slots_and_the_open_one(live: set[int], turn: int) -> None:
    claim = Layout(0, turn, 0, sum(1 << slot for slot in live)).claim()
    looked = {slot for slot in range(POP_SLOTS) if f"DELETE FROM ready_{slot} " in claim}
    assert looked == live | {turn % READY_SLOTS}


@given(slot=st.integers(0, READY_SLOTS - 1), turn=st.integers(0, 1000))
def test_slot_was_opened_at_the_last_turn_that_names_it(slot: int, turn: int) -> None:
    opened = Turns(turn, 0).opened_at(slot)
    assert turn - READY_SLOTS < opened <= turn
    assert opened % READY_SLOTS == slot
    cold = Turns(0, turn).opened_at(READY_SLOTS + slot % COLD_SLOTS)
    assert turn - COLD_SLOTS < cold <= turn
    assert cold % COLD_SLOTS == slot % COLD_SLOTS


def test_claim_raises_the_floor_of_all_slots_but_the_open_one() -> None:
    floors = Floors()
    floors.raise_to(1, Turns(3, 2), HERE, floors.epoch)
    assert [place == HERE for place in floors.of(1, Turns(3, 2))] == [
        slot != 3 and slot != READY_SLOTS + 2 for slot in range(POP_SLOTS)
    ]
    assert floors.of(2, Turns(3, 2)) == [START] * POP_SLOTS


def test_floor_never_falls() -> None:
    floors = Floors()
    floors.raise_to(1, Turns(3, 2), HERE, floors.epoch)
    floors.raise_to(1, Turns(3, 2), Place(4, 9, 9), floors.epoch)
    assert floors.of(1, Turns(3, 2))[0] == HERE


def test_reopened_slot_has_no_floor() -> None:
    floors = Floors()
    floors.raise_to(1, Turns(3, 2), HERE, floors.epoch)
    assert [slot for slot, place in enumerate(floors.of(1, Turns(5, 2))) if place == START] == [
        3,
        4,
        5,
        READY_SLOTS + 2,
    ]
    assert floors.of(1, Turns(3 + READY_SLOTS, 2 + COLD_SLOTS)) == [START] * POP_SLOTS, "each was opened since"


def test_lost_connection_forgets_all_floors_and_those_of_earlier_claims() -> None:
    floors = Floors()
    before = floors.epoch
    floors.raise_to(1, Turns(3, 2), HERE, floors.epoch)
    floors.clear()
    floors.raise_to(1, Turns(3, 2), HERE, before)
    assert floors.of(1, Turns(3, 2)) == [START] * POP_SLOTS
