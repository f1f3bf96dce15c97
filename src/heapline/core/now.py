"""Time as the core sees it: one reading of both clocks, passed in with every decision."""

from __future__ import annotations

from typing import NamedTuple


class Now(NamedTuple):
    """One reading of the clocks, in ms since the Unix epoch."""

    steady: int  # never jumps; leases, delays and backoff use it
    wall: int  # as the system reports it; `deliver_at` uses it
