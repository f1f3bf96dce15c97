"""Schedules: decide what fires when, without a clock, a file or a queue.

`cron` yields the instants of a cron expression in a time zone. `timetable` decides the next firing and which firings
are owed after an absence. `records` defines the stored records. `book` holds all schedules of a broker. The public
definition of a schedule is in contract/schedules.py.
"""
