"""Schedules: what fires when, decided without a clock, a file or a queue.

`definition` what a schedule is · `cron` instants of a cron expression in a time zone · `timetable` the next firing and
what is owed · `records` what is written down · `book` all schedules of a broker · `telling` what people are told.

Nothing is loaded before it is used: clients need to spell schedules, and neither the book nor time zones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heapline.schedules.book import Book, Standing, Taken
    from heapline.schedules.definition import Schedule, make_schedule, schedule_of
    from heapline.schedules.records import (
        BookState,
        Record,
        ScheduleDeleted,
        ScheduleFired,
        SchedulePaused,
        ScheduleResumed,
        ScheduleSet,
        ScheduleState,
        decode_record,
        decode_state,
        encode_record,
        encode_state,
    )
    from heapline.schedules.telling import ScheduleInfo, tell
    from heapline.schedules.timetable import Owed, Timetable

__all__ = [
    "Book", "BookState", "Owed", "Record", "Schedule", "ScheduleDeleted", "ScheduleFired", "ScheduleInfo",
    "SchedulePaused", "ScheduleResumed", "ScheduleSet", "ScheduleState", "Standing", "Taken", "Timetable",
    "decode_record", "decode_state", "encode_record", "encode_state", "make_schedule", "schedule_of", "tell",
]  # fmt: skip

#: Where names are; all others are records.
_HOMES = {
    "book": ("Book", "Standing", "Taken"),
    "definition": ("Schedule", "make_schedule", "schedule_of"),
    "telling": ("ScheduleInfo", "tell"),
    "timetable": ("Owed", "Timetable"),
}
_HOME_OF = dict.fromkeys(__all__, "records") | {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOME_OF:
            raise AttributeError(f"module 'heapline.schedules' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"heapline.schedules.{_HOME_OF[name]}"), name)
        return value
