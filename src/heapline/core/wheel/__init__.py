"""Timers: which messages are due, at a cost that does not grow with the number waiting."""
