"""Errors of `heapline.assign`. Each also belongs to the branch of Heapline's tree that says what the caller should do.

AssignError
├── BadConfig                   RequestError: a setting is malformed, or two settings contradict each other
├── BadPartition                RequestError: a partition's keys or weight are malformed, or it is listed twice
├── BadStrategy                 RequestError: a strategy did not assign every partition to exactly one worker
├── StableIDExhausted           UnavailableError: all worker ids are taken
├── ConnectionLost              UnavailableError: the key-value store does not answer
├── ElectionFailed              UnavailableError: no leader was elected
├── StartupTimeout              UnavailableError: `start()` did not reach a first assignment in time
├── ShutdownTimeout             UnavailableError: `stop()` could not drop and release everything in time
└── AssignmentVersionMismatch   ConflictError: another leader wrote a newer assignment
"""

from __future__ import annotations

from heapline.contract.errors import ConflictError, HeaplineError, RequestError, UnavailableError


class AssignError(HeaplineError):
    """Base class of all errors that `heapline.assign` raises on purpose."""


class _Detailed(HeaplineError):
    """An error whose one field is a text; `text` is its message."""

    fields = ("detail",)
    text = "{}"

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(self.text.format(detail))


class BadConfig(_Detailed, AssignError, RequestError, ValueError):
    pass


class BadPartition(_Detailed, AssignError, RequestError, ValueError):
    pass


class BadStrategy(AssignError, RequestError, ValueError):
    fields = ("strategy", "detail")

    def __init__(self, strategy: str, detail: str) -> None:
        self.strategy, self.detail = strategy, detail
        super().__init__(
            f"strategy {strategy} {detail}; assign() must give each partition to exactly one of the given "
            "workers; the assignment was not changed"
        )


class StableIDExhausted(AssignError, UnavailableError):
    fields = ("first", "last")

    def __init__(self, first: str, last: str) -> None:
        self.first, self.last = first, last
        super().__init__(
            f"all worker ids from {first} to {last} are taken; raise worker_id_max or stop a worker (a crashed "
            "worker's id becomes free after worker_id_ttl)"
        )


class ConnectionLost(_Detailed, AssignError, UnavailableError):
    text = (
        "the key-value store does not answer ({}); will retry; a worker that cannot renew its lease stops its "
        "partitions"
    )


class ElectionFailed(_Detailed, AssignError, UnavailableError):
    text = "no leader was elected ({}); will retry; current assignments stay in force"


class StartupTimeout(AssignError, UnavailableError, TimeoutError):
    fields = ("seconds", "state")

    def __init__(self, seconds: float, state: str) -> None:
        self.seconds, self.state = seconds, state
        super().__init__(
            f"start() got no assignment within startup_timeout ({seconds:g} s), state {state}; the worker id was "
            "released; check that a leader is running and the store answers, or raise startup_timeout"
        )


class ShutdownTimeout(AssignError, UnavailableError, TimeoutError):
    fields = ("seconds", "undropped")

    def __init__(self, seconds: float, undropped: int) -> None:
        self.seconds, self.undropped = seconds, undropped
        super().__init__(
            f"stop() did not finish within {seconds:g} s, {undropped} partitions were not dropped; "
            "other workers get them when this worker's lease ends; check that the hook returns, or raise "
            "shutdown_timeout, or the timeout given to stop()"
        )


class AssignmentVersionMismatch(AssignError, ConflictError):
    fields = ("expected", "found")

    def __init__(self, expected: int, found: int) -> None:
        self.expected, self.found = expected, found
        super().__init__(
            f"the assignment is at version {found}, not {expected}: another leader has written it; read it and "
            "decide again"
        )
