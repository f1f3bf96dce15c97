"""The targets of the SDK, as data."""

from __future__ import annotations

#: (messages per batch, calls in flight); of the thin wire client's rate in the same run, for each kind.
BATCHES = (100, 16)
OF_THE_WIRE = 0.9

#: Coroutines that enqueue, consume and ack one message per call, and lifecycles per second.
SINGLES = 256
SINGLES_PER_S = 35_000
SINGLES_SERVER_US, SINGLES_CLIENT_US = 14.0, 12.0

#: Tasks with an empty async handler: concurrent ones, tasks per second, and the factor over each peer.
CONCURRENCY = 64
TASKS_PER_S = 8_000
PEERS = {"awa": 5.0, "procrastinate": 10.0, "celery": 10.0, "celery-everysec": 10.0}
#: (tasks per batch, batches in progress): this many wait all the time. More would take slow peers too long.
TASK_BATCHES = (100, 4)

#: `import heapline`, of `import numpy`.
IMPORT_OF_NUMPY = 3.0
#: `heapline.open` up to the first enqueue, of `import numpy, msgspec`; and CPU seconds until processes are ready.
OPEN_OF_NUMPY_AND_MSGSPEC = 1.5
SERVE_CPU_S = 0.9
WORKER_CPU_S = 0.5

#: Messages per second through one `heapline worker`, and percent of a core of each process.
TRICKLE_PER_S = 100
TRICKLE_SERVER_PERCENT, TRICKLE_WORKER_PERCENT = 10.0, 5.0
