"""One table from the error tree to gRPC and HTTP codes, and the way back to the same exception.

A class has the codes of its nearest ancestor in the table. On the wire an error is JSON: its class, facts and text.
A client that does not know the class (a newer server's) raises the branch that belongs to the code. What is not one of
Heapline's own errors is told as INTERNAL, and nothing of it is told.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from heapline import errors
from heapline.errors import HeaplineError

METADATA = "heapline-error-bin"
FACTS_BYTES_MAX = 3072  # of metadata: most stacks refuse more than 8 KiB of it
LIST_MAX = 100
INTERNAL_TEXT = "internal error: the server's log says more"


class Codes(NamedTuple):
    grpc: str  # the name in grpc.StatusCode
    http: int


TABLE: dict[type[HeaplineError], Codes] = {
    errors.HeaplineError: Codes("UNKNOWN", 500),
    errors.RequestError: Codes("INVALID_ARGUMENT", 400),
    errors.PayloadTooLarge: Codes("INVALID_ARGUMENT", 413),
    errors.TopicNotFound: Codes("NOT_FOUND", 404),
    errors.MessageNotFound: Codes("NOT_FOUND", 404),
    errors.ScheduleNotFound: Codes("NOT_FOUND", 404),
    errors.GroupNotFound: Codes("NOT_FOUND", 404),
    errors.ReplayNotFound: Codes("NOT_FOUND", 404),
    errors.GroupExists: Codes("ALREADY_EXISTS", 409),
    errors.ReplayExists: Codes("ALREADY_EXISTS", 409),
    errors.UnknownPart: Codes("NOT_FOUND", 404),
    errors.TopicExists: Codes("ALREADY_EXISTS", 409),
    errors.Unauthenticated: Codes("UNAUTHENTICATED", 401),
    errors.PermissionDenied: Codes("PERMISSION_DENIED", 403),
    errors.ConfirmationNeeded: Codes("FAILED_PRECONDITION", 428),
    errors.Closed: Codes("UNAVAILABLE", 503),
    errors.ConflictError: Codes("ABORTED", 409),
    errors.LeaseLost: Codes("FAILED_PRECONDITION", 409),
    errors.DeliveryLost: Codes("FAILED_PRECONDITION", 409),
    errors.MemberReplaced: Codes("FAILED_PRECONDITION", 409),
    errors.MessageLeased: Codes("FAILED_PRECONDITION", 409),
    errors.StaleEpoch: Codes("FAILED_PRECONDITION", 409),
    errors.StaleSequence: Codes("FAILED_PRECONDITION", 409),
    errors.DirectoryLocked: Codes("FAILED_PRECONDITION", 409),
    errors.IdempotencyConflict: Codes("ABORTED", 409),
    errors.BatchDecided: Codes("ABORTED", 409),
    errors.UnavailableError: Codes("UNAVAILABLE", 503),
    errors.ResourceExhausted: Codes("RESOURCE_EXHAUSTED", 429),
    errors.StorageFull: Codes("RESOURCE_EXHAUSTED", 507),
    errors.BatchInDoubt: Codes("ABORTED", 409),
    errors.TopicReloading: Codes("UNAVAILABLE", 503),
    errors.DeadlineExceeded: Codes("DEADLINE_EXCEEDED", 504),
    errors.CorruptionError: Codes("DATA_LOSS", 500),
}
#: What an answer without details means: from a proxy, from gRPC itself, or of a class that is not known here.
BRANCHES: dict[str, type[HeaplineError]] = {
    "INVALID_ARGUMENT": errors.RequestError, "NOT_FOUND": errors.RequestError, "ALREADY_EXISTS": errors.RequestError,
    "OUT_OF_RANGE": errors.RequestError, "UNIMPLEMENTED": errors.RequestError,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "ABORTED": errors.ConflictError, "FAILED_PRECONDITION": errors.ConflictError,
    "UNAVAILABLE": errors.UnavailableError, "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded, "CANCELLED": errors.UnavailableError,
    "DATA_LOSS": errors.CorruptionError,
}  # fmt: skip


def tree(root: type[HeaplineError] = HeaplineError) -> list[type[HeaplineError]]:
    """Every class of the tree that errors.py draws."""
    found = [root]
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            found += tree(child)
    return found


_BY_NAME = {kind.__name__: kind for kind in tree()}


def codes_of(kind: type[HeaplineError]) -> Codes:
    return next(TABLE[ancestor] for ancestor in kind.__mro__ if ancestor in TABLE)


def describe(error: HeaplineError) -> dict[str, Any]:
    """What the wire carries of an error. The class is one that errors.py knows, also for a subclass made elsewhere."""
    kind = next(ancestor for ancestor in type(error).__mro__ if _BY_NAME.get(ancestor.__name__) is ancestor)
    facts, text = error.facts(), str(error)
    if isinstance(error, _MAY_NAME_FILES):
        path = facts.get("path")
        if isinstance(path, str):  # as it stands, whatever it is made of
            text = text.replace(path, _inner(path))
            facts["path"] = _inner(path)
        text = without_paths(text)
        facts = {
            n: without_paths(v) if n in _TOLD_BY_THE_MACHINE and isinstance(v, str) else v for n, v in facts.items()
        }
    return {"error": kind.__name__, "facts": facts, "text": text}


#: Errors of the server's own making, which may quote files. What a request got wrong quotes the caller's own words.
_MAY_NAME_FILES = (errors.CorruptionError, errors.UnavailableError, errors.DirectoryLocked)
_TOLD_BY_THE_MACHINE = ("path", "detail", "cause", "what")
_QUOTED_PATH = re.compile(r"""(['"])(/[^'"]*/[^'"]*)\1""")
_PATH = re.compile(r"""(?<![^\s('"=:,])/(?:[^\s/'",;:()]+/)+[^\s/'",;:()]*""")


def without_paths(text: str) -> str:
    """Where a server keeps its files is no business of its clients; which file of a topic it is may help them.

    >>> without_paths("[Errno 5] error: '/srv/my data/topics/default/jobs-1/segments/7.seg' is bad")
    "[Errno 5] error: 'default/jobs-1/segments/7.seg' is bad"
    """
    text = _QUOTED_PATH.sub(lambda m: f"{m[1]}{_inner(m[2])}{m[1]}", text)
    return _PATH.sub(lambda m: _inner(m[0]), text)


def _inner(path: str) -> str:
    """Inside the data directory's topics, or else the name alone."""
    _, found, rest = path.rpartition("/topics/")
    return rest if found else path.rstrip("/").rpartition("/")[2]


def to_metadata(error: HeaplineError) -> bytes:
    """`describe` as JSON that fits into metadata: long lists are cut (a call tells them in its answer instead)."""
    told = describe(error)
    data = json.dumps(told).encode()
    if len(data) > FACTS_BYTES_MAX:
        told["facts"] = {name: _shorter(value) for name, value in told["facts"].items()}
        told["text"] = told["text"][:500]
        data = json.dumps(told).encode()
    return data


def _shorter(value: Any) -> Any:
    return value[:LIST_MAX] if isinstance(value, list) else value[:500] if isinstance(value, str) else value


def rebuild(told: dict[str, Any], code: str = "UNKNOWN") -> HeaplineError:
    """The exception that was described, of the same class with the same facts and text."""
    kind, facts, text = _BY_NAME.get(told.get("error", "")), told.get("facts") or {}, str(told.get("text", ""))
    if kind is None or not isinstance(facts, dict) or any(name not in facts for name in kind.fields):
        return of_code(code, text)
    error = kind.__new__(kind)
    error.args = (text,)
    error.__dict__.update({name: facts[name] for name in kind.fields})
    return error


def from_metadata(data: bytes, code: str, text: str) -> HeaplineError:
    try:
        told = json.loads(data)
    except ValueError:
        told = None
    return rebuild(told, code) if isinstance(told, dict) else of_code(code, text)


def of_code(code: str, text: str) -> HeaplineError:
    """An error of which only the code is known."""
    kind = BRANCHES.get(code, HeaplineError)
    error = kind.__new__(kind)
    error.args = (text or code,)
    error.__dict__.update(dict.fromkeys(kind.fields))
    return error
