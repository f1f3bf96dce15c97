"""What `heapline.assign` raises on purpose. Each also stands under the branch of the house that says what to do:

AssignError
├── BadConfig                   RequestError: a setting is malformed, or two do not fit together
├── BadPartition                RequestError: a partition's keys or weight are malformed, or it is there twice
├── BadStrategy                 RequestError: a strategy's answer is not an assignment of all partitions
├── StableIDExhausted           UnavailableError: all worker ids are taken
├── ConnectionLost              UnavailableError: the key-value store does not answer
├── ElectionFailed              UnavailableError: nobody leads
├── StartupTimeout              UnavailableError: `start()` did not get as far as a first assignment
├── ShutdownTimeout             UnavailableError: `stop()` could not drop and give back everything in time
└── AssignmentVersionMismatch   ConflictError: somebody else wrote a newer assignment
"""

from __future__ import annotations

from heapline.errors import ConflictError, HeaplineError, RequestError, UnavailableError


class AssignError(HeaplineError):
    """Base of everything that `heapline.assign` raises on purpose."""


class BadConfig(AssignError, RequestError, ValueError):
    fields = ("detail",)

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)


class BadPartition(AssignError, RequestError, ValueError):
    fields = ("detail",)

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)


class BadStrategy(AssignError, RequestError, ValueError):
    fields = ("strategy", "detail")

    def __init__(self, strategy: str, detail: str) -> None:
        self.strategy, self.detail = strategy, detail
        super().__init__(
            f"strategy {strategy} {detail}: assign() must give each partition to exactly one of the workers it was "
            "asked about; nothing was changed"
        )


class StableIDExhausted(AssignError, UnavailableError):
    fields = ("first", "last")

    def __init__(self, first: str, last: str) -> None:
        self.first, self.last = first, last
        super().__init__(
            f"all worker ids from {first} to {last} are taken: raise worker_id_max, or stop a worker; the id of one "
            "that crashed is free after worker_id_ttl"
        )


class ConnectionLost(AssignError, UnavailableError):
    fields = ("detail",)

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(
            f"the key-value store does not answer ({detail}): it is asked again by itself; a worker that cannot renew "
            "its lease stops its partitions"
        )


class ElectionFailed(AssignError, UnavailableError):
    fields = ("detail",)

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(f"no leader was elected ({detail}): it is tried again by itself; assignments stay as they are")


class StartupTimeout(AssignError, UnavailableError, TimeoutError):
    fields = ("seconds", "state")

    def __init__(self, seconds: float, state: str) -> None:
        self.seconds, self.state = seconds, state
        super().__init__(
            f"start() had no assignment after startup_timeout ({seconds:g} s), in state {state}: what was claimed is "
            "given back; see that a leader runs and that the store answers, or raise startup_timeout"
        )


class ShutdownTimeout(AssignError, UnavailableError, TimeoutError):
    fields = ("seconds", "undropped")

    def __init__(self, seconds: float, undropped: int) -> None:
        self.seconds, self.undropped = seconds, undropped
        super().__init__(
            f"stop() was not through after shutdown_timeout ({seconds:g} s), with {undropped} partitions not dropped: "
            "others get them when the lease of this worker has ended; see that the hook returns, or raise "
            "shutdown_timeout"
        )


class AssignmentVersionMismatch(AssignError, ConflictError):
    fields = ("expected", "found")

    def __init__(self, expected: int, found: int) -> None:
        self.expected, self.found = expected, found
        super().__init__(
            f"the assignment is at version {found}, not {expected}: somebody else has written it; read it and decide "
            "anew"
        )
