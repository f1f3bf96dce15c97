"""The targets of the Postgres broker, as data."""

from __future__ import annotations

from benchmarks.server.targets import Bound

BATCH, IN_FLIGHT, BACKLOG = 100, 16, 10_000
#: The minimum multiple of each driver's rate on the same server.
PEERS = {"postgres": 1.0, "pgmq": 5.0, "seed_table": None, "awa": 5.0}
HELD = Bound("≥", 0.5, "×")  # of the fresh rate, while an old transaction is open
DELAYED = Bound("≤", 1.3, "×")  # time per message with DELAYED_ROWS, of that without
NODES = Bound("≤", 1.15, "×")  # CPU per message of two nodes on two shards, of one on one
ANSWERED_MS = Bound("≤", 2.0, "ms")
DEQUEUED_MS = Bound("≤", 2.0, "ms")
DELAYED_ROWS, DELAYED_ROWS_QUICK = 10_000_000, 1_000_000
HELD_SECONDS, HELD_SECONDS_QUICK = 60.0, 10.0
