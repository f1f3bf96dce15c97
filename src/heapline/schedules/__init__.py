"""Schedules: what fires when, decided without a clock, a file or a queue.

`definition` what a schedule is · `cron` instants of a cron expression in a time zone · `timetable` the next firing and
what is owed · `records` what is written down · `book` all schedules of a broker · `telling` what people are told.
"""

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
    "decode_record", "decode_state", "encode_record", "encode_state", "make_schedule", "schedule_of",
    "tell",
]  # fmt: skip
