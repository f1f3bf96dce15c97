from __future__ import annotations

from typing import Any

import pytest

from heapline.contract.errors import BadRequest, ResourceExhausted, ScheduleNotFound
from heapline.contract.message import from_ms
from heapline.contract.schedules import Schedule, make_schedule
from heapline.core.schedules.book import LOOK_AGAIN_MS, Book
from heapline.core.schedules.records import ScheduleFired, ScheduleSet
from tests.unit.schedules.naive import DAY, HOUR, MINUTE, ms

NOW = ms("2026-11-16T12:30")
HOURS = [NOW - 30 * MINUTE + i * HOUR for i in range(10)]  # 12:00, 13:00, …


def hourly(name: str = "hourly", **fields: Any) -> Schedule:
    return make_schedule(name, **{"topic": "jobs", "cron": "0 * * * *", **fields})


def with_hourly(**fields: Any) -> Book:
    book = Book()
    book.set(hourly(**fields), NOW)
    return book


def fire(book: Book, now: int) -> list[int]:
    """Take all owed firings as if every enqueue and record succeeded; return the times that fired."""
    fired = []
    while taken := book.take_due(now):
        for one in taken:
            fired += [m.seq for m in one.messages if m.seq is not None]
            book.apply(one.record)
    return fired


# --- firing -----------------------------------------------------------------------------------------------------------


def test_schedule_fires_at_its_times_and_at_no_other() -> None:
    book = with_hourly()
    assert fire(book, HOURS[1] - 1) == []
    assert fire(book, HOURS[1]) == [HOURS[1]]
    assert fire(book, HOURS[1] + 5) == []
    assert fire(book, HOURS[2] + 5) == [HOURS[2]]


def test_new_schedule_fires_nothing_of_the_past() -> None:
    book = Book()
    book.set(hourly(), HOURS[1])
    assert fire(book, HOURS[1] + 1) == []


def test_taking_changes_nothing_until_the_record_is_applied() -> None:
    book = with_hourly()
    before = book.to_state()
    first, again = book.take_due(HOURS[1]), book.take_due(HOURS[1])
    assert first == again != []
    assert book.to_state() == before
    book.apply(first[0].record)
    assert book.take_due(HOURS[1]) == []


def test_taken_firings_contain_topic_messages_and_record() -> None:
    (taken,) = with_hourly(payload=b"p").take_due(HOURS[1])
    assert (taken.name, taken.topic, taken.missed) == ("default/hourly", "default/jobs", False)
    assert [m.payload for m in taken.messages] == [b"p"]
    assert taken.record == ScheduleFired("default/hourly", 1, HOURS[1], HOURS[1], 1)


def test_skipped_firings_leave_a_record_without_messages() -> None:
    book = with_hourly(misfire="skip")
    (taken,) = book.take_due(HOURS[3] + 10 * MINUTE)
    assert (taken.messages, taken.missed) == ([], True)
    assert taken.record == ScheduleFired("default/hourly", 1, HOURS[3], None, 0)
    book.apply(taken.record)
    info = book.get("hourly")
    assert (info.state.fired_ms, info.state.fired_count, info.next_ms) == (None, 0, HOURS[4])


def test_missed_firings_are_returned_in_slices_completely() -> None:
    book = with_hourly(misfire="all")
    fired: list[int] = []
    sizes = []
    while taken := book.take_due(HOURS[9] + 10 * MINUTE, limit=4):
        sizes.append(sum(len(one.messages) for one in taken))
        fired += [one.record.until_ms for one in taken]
        for one in taken:
            book.apply(one.record)
    assert sizes == [4, 4, 1]
    assert fired == [HOURS[4], HOURS[8], HOURS[9]]
    assert book.get("hourly").state.fired_count == 9


def test_longest_overdue_schedule_is_taken_first_within_the_limit() -> None:
    book = Book()
    for name, cron in (("late", "50 12 * * *"), ("early", "40 12 * * *"), ("later", "0 13 * * *")):
        book.set(hourly(name, cron=cron), NOW)
    taken = book.take_due(HOURS[1], limit=2)
    assert [one.name for one in taken] == ["default/early", "default/late"]


def test_late_record_changes_nothing() -> None:
    book = with_hourly()
    (taken,) = book.take_due(HOURS[1])
    book.set(hourly(cron="30 * * * *"), HOURS[1])
    before = book.to_state()
    book.apply(taken.record)
    book.apply(ScheduleFired("default/gone", 1, HOURS[1], HOURS[1], 1))
    assert book.to_state() == before


# --- waking -----------------------------------------------------------------------------------------------------------


def test_wake_is_the_earliest_firing_and_not_far_off() -> None:
    book = with_hourly()
    assert book.next_wake(NOW) == NOW + LOOK_AGAIN_MS
    assert book.next_wake(HOURS[1] - 5) == HOURS[1]
    assert book.next_wake(HOURS[1] + 5) == HOURS[1]
    fire(book, HOURS[1] + 5)
    assert book.next_wake(HOURS[2] - 1) == HOURS[2]


def test_no_wake_where_nothing_will_fire() -> None:
    book = Book()
    assert book.next_wake(NOW) is None
    book.set(hourly(), NOW)
    book.pause("hourly", NOW)
    assert book.next_wake(NOW) is None
    assert book.take_due(HOURS[5]) == []


def test_postponed_schedule_does_not_delay_others_and_still_owes() -> None:
    book = with_hourly()
    book.set(hourly("other"), NOW)
    book.postpone("hourly", HOURS[1] + MINUTE)
    assert [one.name for one in book.take_due(HOURS[1])] == ["default/other"]
    fire(book, HOURS[1])
    assert book.next_wake(HOURS[1] + MINUTE - 1) == HOURS[1] + MINUTE
    assert [one.name for one in book.take_due(HOURS[1] + MINUTE)] == ["default/hourly"]


def test_many_changes_leave_no_garbage() -> None:
    book = with_hourly()
    for i in range(1000):
        book.set(hourly(payload=b"%d" % i), NOW)
    assert len(book._heap) < 100
    assert fire(book, HOURS[1]) == [HOURS[1]]


def test_thousands_of_schedules_are_checked_only_when_due(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book()
    for i in range(3000):
        book.set(hourly(f"s{i}", cron=f"{i % 60} * * * *"), NOW)
    looked: list[str] = []
    real = Book._owed
    monkeypatch.setattr(
        Book, "_owed", lambda self, held, *rest: looked.append(held.state.schedule.name) or real(self, held, *rest)
    )
    assert len(fire(book, HOURS[1])) == 30 * 50  # those of 12:31 to 13:00, one each …
    assert len(looked) == 30 * 50


# --- changing ---------------------------------------------------------------------------------------------------------


def test_same_schedule_again_changes_nothing() -> None:
    book = with_hourly()
    before = book.to_state()
    assert book.set(hourly(), HOURS[3]) is None
    assert book.to_state() == before


def test_changed_schedule_fires_nothing_of_the_past() -> None:
    book = with_hourly()
    assert fire(book, HOURS[1]) == [HOURS[1]]
    record = book.set(hourly(cron="*/10 * * * *"), HOURS[1] + 25 * MINUTE)
    assert isinstance(record, ScheduleSet)
    assert record.incarnation == 2
    assert fire(book, HOURS[1] + 25 * MINUTE) == []
    assert fire(book, HOURS[1] + 30 * MINUTE) == [HOURS[1] + 30 * MINUTE]


def test_changed_schedule_does_not_fire_again_what_fired_before_a_clock_was_set_back() -> None:
    book = with_hourly()
    assert fire(book, HOURS[3]) == [HOURS[3]]
    book.set(hourly(payload=b"new"), HOURS[1])
    assert fire(book, HOURS[3]) == []
    assert fire(book, HOURS[4]) == [HOURS[4]]


def test_change_of_the_payload_does_not_shift_every() -> None:
    book = Book()
    book.set(make_schedule("e", topic="t", every=600), NOW)
    book.set(make_schedule("e", topic="t", every=600, payload=b"new"), NOW + 7 * MINUTE)
    assert book.get("e").next_ms == NOW + 10 * MINUTE
    book.set(make_schedule("e", topic="t", every=1200, payload=b"new"), NOW + 8 * MINUTE)
    assert book.get("e").next_ms == NOW + 28 * MINUTE


def test_due_firings_can_be_settled_before_a_change() -> None:
    book = with_hourly()
    taken = book.take_one("hourly", HOURS[1])
    assert taken is not None
    assert taken == book.take_due(HOURS[1])[0]
    book.apply(taken.record)
    assert book.take_one("hourly", HOURS[1]) is None


def test_pause_drops_due_firings_and_survives_a_change() -> None:
    book = with_hourly(misfire="all")
    assert book.pause("hourly", NOW) is not None
    assert book.pause("hourly", NOW) is None
    book.set(hourly(misfire="all", payload=b"new"), NOW)
    assert fire(book, HOURS[2]) == []
    assert book.take_one("hourly", HOURS[2]) is None
    assert book.resume("hourly", HOURS[2] + 1) is not None
    assert book.resume("hourly", HOURS[2] + 1) is None
    assert fire(book, HOURS[3]) == [HOURS[3]]


def test_deleted_schedule_never_reuses_its_incarnation() -> None:
    book = with_hourly()
    fire(book, HOURS[1])
    book.delete("hourly")
    assert (len(book), book.next_wake(NOW)) == (0, None)
    again = Book.from_state(book.to_state())
    record = again.set(hourly(), NOW)  # a clock set back: the same time again, for another schedule
    assert record is not None
    assert record.incarnation == 2
    assert fire(again, HOURS[1]) == [HOURS[1]]


@pytest.mark.parametrize("call", ["get", "delete"])
def test_unknown_schedule_is_named(call: str) -> None:
    with pytest.raises(ScheduleNotFound, match="default/nope"):
        getattr(Book(), call)("nope")


@pytest.mark.parametrize("call", ["pause", "resume", "rewind", "take_one"])
def test_unknown_schedule_is_named_by_calls_with_a_time(call: str) -> None:
    with pytest.raises(ScheduleNotFound, match="default/nope"):
        getattr(Book(), call)("nope", NOW)


def test_schedule_that_never_fires_is_refused_and_changes_nothing() -> None:
    book = with_hourly()
    before = book.to_state()
    over = make_schedule("hourly", topic="t", every=60, ends=from_ms(NOW))
    for schedule in (hourly(cron="0 0 */20 * 1L"), over):
        with pytest.raises(BadRequest, match="never fires"):
            book.set(schedule, NOW)
    assert book.to_state() == before


def test_number_of_schedules_is_limited() -> None:
    book = Book(schedules_max=1)
    book.set(hourly(), NOW)
    book.set(hourly(payload=b"changed"), NOW)
    with pytest.raises(ResourceExhausted, match="number of schedules"):
        book.set(hourly("second"), NOW)


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_clock_set_back_fires_nothing_twice() -> None:
    book = with_hourly()
    assert fire(book, HOURS[3]) == [HOURS[3]]
    for at in (HOURS[1], HOURS[2], HOURS[3]):
        assert fire(book, at) == []
    assert fire(book, HOURS[4]) == [HOURS[4]]


def test_clock_set_forward_counts_as_downtime() -> None:
    book = with_hourly(misfire="once")
    assert fire(book, HOURS[9] + 10 * MINUTE) == [HOURS[9]]


def test_schedule_that_ran_ahead_is_named_and_can_be_rewound() -> None:
    book = with_hourly()
    fire(book, NOW + 3000 * DAY)
    assert book.ran_ahead(NOW + 3000 * DAY) == []
    assert book.ran_ahead(NOW) == ["default/hourly"]
    assert fire(book, HOURS[1]) == []
    record = book.rewind("hourly", NOW)
    assert record.incarnation == 2
    assert book.ran_ahead(NOW) == []
    assert fire(book, HOURS[1]) == [HOURS[1]]


def test_interval_created_by_a_fast_clock_keeps_its_phase_when_rewound() -> None:
    book = Book()
    book.set(make_schedule("e", topic="t", every=600), NOW + 3000 * DAY)
    book.rewind("e", NOW + 3 * MINUTE)
    assert book.get("e").next_ms == NOW + 10 * MINUTE


def test_late_record_does_not_undo_a_rewind() -> None:
    book = with_hourly()
    (taken,) = book.take_due(NOW + 3000 * DAY)
    book.rewind("hourly", NOW)
    book.apply(taken.record)
    assert fire(book, HOURS[1]) == [HOURS[1]]


def test_resuming_after_a_clock_was_set_back_fires_nothing_twice() -> None:
    book = with_hourly()
    assert fire(book, HOURS[3]) == [HOURS[3]]
    book.pause("hourly", HOURS[3])
    book.resume("hourly", NOW)
    assert fire(book, HOURS[3]) == []
    assert fire(book, HOURS[4]) == [HOURS[4]]


# --- listing and opening ----------------------------------------------------------------------------------------------


def test_listing_is_by_name_and_namespace() -> None:
    book = Book()
    for name in ("b", "a", "other/a"):
        book.set(hourly(name), NOW)
    assert [info.state.schedule.name for info in book.list_all()] == ["default/a", "default/b", "other/a"]
    assert [info.state.schedule.name for info in book.list_all("other")] == ["other/a"]
    assert book.get("a").next_ms == HOURS[1]


def test_book_opens_even_if_a_time_zone_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    book = with_hourly(tz="Europe/Berlin")
    state = book.to_state()

    def unknown(cron: str, tz: str) -> None:
        raise BadRequest("no such zone")

    with monkeypatch.context() as patch:
        patch.setattr("heapline.contract.cron.cron_times", unknown)
        elsewhere = Book.from_state(state)
        assert elsewhere.take_due(HOURS[5]) == []
        assert elsewhere.get("hourly").problem == "no such zone"
        assert elsewhere.to_state() == state
    assert Book.from_state(elsewhere.to_state()).get("hourly").next_ms == HOURS[1]
