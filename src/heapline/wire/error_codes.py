"""The table from the error tree to gRPC and HTTP codes, and the way back to the same exception.

A class has the codes of its nearest ancestor in the table. On the wire an error is JSON: its class, facts and text. A
client that does not know the class, because the server is newer, raises the class that the code stands for. An
exception that is not one of Heapline's own is reported as INTERNAL, without its text.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

from heapline.contract import errors
from heapline.contract.admin import Describe
from heapline.contract.call import Call
from heapline.contract.errors import HeaplineError
from heapline.contract.groups import CreateGroup
from heapline.contract.replays import GetReplay, ListReplays
from heapline.contract.schedules import CreateSchedule
from heapline.contract.topics import CreateTopic, UpdateTopic

METADATA = "heapline-error-bin"
FACTS_BYTES_MAX = 3072  # in metadata; most gRPC implementations refuse more than 8 KiB of it in all
LIST_MAX = 100  # items of a list that metadata keeps
INTERNAL_TEXT = "internal error; see the server's log"


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
    errors.Unsupported: Codes("UNIMPLEMENTED", 501),
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
    errors.UnavailableError: Codes("UNAVAILABLE", 503),
    errors.ResourceExhausted: Codes("RESOURCE_EXHAUSTED", 429),
    errors.StorageFull: Codes("RESOURCE_EXHAUSTED", 507),
    errors.BatchInDoubt: Codes("ABORTED", 409),
    errors.DeadlineExceeded: Codes("DEADLINE_EXCEEDED", 504),
    errors.CorruptionError: Codes("DATA_LOSS", 500),
}
#: The class of an answer without details: from a proxy, from gRPC itself, or of a class that is not known here.
BRANCHES: dict[str, type[HeaplineError]] = {
    "INVALID_ARGUMENT": errors.RequestError,
    "NOT_FOUND": errors.RequestError,
    "ALREADY_EXISTS": errors.RequestError,
    "OUT_OF_RANGE": errors.RequestError,
    "UNIMPLEMENTED": errors.Unsupported,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "ABORTED": errors.ConflictError,
    "FAILED_PRECONDITION": errors.ConflictError,
    "UNAVAILABLE": errors.UnavailableError,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.UnavailableError,
    "DATA_LOSS": errors.CorruptionError,
}


class _Advice(NamedTuple):
    """Words for users of Python, which those of another interface replace."""

    python: str
    http: str
    grpc: str
    page: str  # of the dashboard


def _of_call(python: str, call: type[Call[Any]], page: str) -> _Advice:
    return _Advice(python, str(call.facts.http), call.facts.rpc, page)


_ADVICE: dict[type[HeaplineError], _Advice] = {
    errors.TopicNotFound: _of_call("create_topic({topic!r})", CreateTopic, "the button on the page Topics"),
    errors.TopicExists: _of_call("update_topic", UpdateTopic, "the topic's tab Config"),
    errors.ScheduleNotFound: _of_call("create_schedule", CreateSchedule, "the button on the page Schedules"),
    errors.GroupNotFound: _of_call("create_group", CreateGroup, "`heapline group create`"),
    errors.ReplayNotFound: _of_call("list_replays()", ListReplays, "the page Pipeline"),
    errors.ReplayExists: _of_call("get_replay({name!r})", GetReplay, "the page Pipeline"),
    errors.Unsupported: _of_call("describe()", Describe, "the call Describe"),
    errors.Closed: _Advice(errors.CLOSED, *["the server's broker is closed; retry when it has started again"] * 3),
    errors.BadRequest: _Advice("datetime.now(UTC)", *["2030-01-31T12:00:00Z"] * 3),
}
#: Values as JSON writes them, at the places where BadRequest mentions them.
_VALUES = re.compile(r"( or |must be |, got )(True or False|None|True|False|null|true or false|true|false)(?= or |$|,)")
_JSON = {"None": "null", "True": "true", "False": "false", "True or False": "true or false"}
_PYTHON = {json: python for python, json in _JSON.items()}
#: Errors that the server's own files can cause. All others quote only what the caller sent.
_MAY_NAME_FILES = (errors.CorruptionError, errors.UnavailableError, errors.DirectoryLocked)
_MACHINE_FACTS = ("path", "detail", "cause", "what")
_QUOTED_PATH = re.compile(r"""(['"])(/[^'"]*/[^'"]*)\1""")
_PATH = re.compile(r"""(?<![^\s('"=:,])/(?:[^\s/'",;:()]+/)+[^\s/'",;:()]*""")


def tree(root: type[HeaplineError] = HeaplineError) -> list[type[HeaplineError]]:
    """Return every class of the tree that errors.py draws."""
    found = [root]
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            found += tree(child)
    return found


_BY_NAME = {kind.__name__: kind for kind in tree()}


def codes_of(kind: type[HeaplineError]) -> Codes:
    return next(TABLE[ancestor] for ancestor in kind.__mro__ if ancestor in TABLE)


def describe(error: HeaplineError) -> dict[str, Any]:
    """Return an error as the wire carries it. A subclass from elsewhere is described as its ancestor in errors.py."""
    kind = next(ancestor for ancestor in type(error).__mro__ if _BY_NAME.get(ancestor.__name__) is ancestor)
    facts, text = error.facts(), str(error)
    if isinstance(error, _MAY_NAME_FILES):
        path = facts.get("path")
        if isinstance(path, str):  # replaced as a whole, whatever characters it has
            text = text.replace(path, _inner(path))
            facts["path"] = _inner(path)
        text = without_paths(text)
        facts = {n: without_paths(v) if n in _MACHINE_FACTS and isinstance(v, str) else v for n, v in facts.items()}
    return {"error": kind.__name__, "facts": facts, "text": text}


def advise(described: dict[str, Any], interface: Literal["http", "grpc", "page"], *, is_back: bool = False) -> str:
    """Return the text of a described error with advice for callers of this interface, or with `is_back` for Python's.

    >>> advise(describe(errors.TopicNotFound("jobs")), "http")
    "topic 'jobs' does not exist; create it with POST /v1/heaps"
    """
    kind, facts, text = _BY_NAME.get(described["error"]), described["facts"], str(described["text"])
    if kind not in _ADVICE or any(name not in facts for name in kind.fields):
        return text
    advice = _ADVICE[kind]
    old, new = advice.python, str(getattr(advice, interface))
    if kind is errors.BadRequest:
        words = _PYTHON if is_back else _JSON
        text = _VALUES.sub(lambda m: m[1] + words.get(m[2], m[2]), text)
    else:
        old, new = old.format_map(facts), new.format_map(facts)
    if is_back:
        old, new = new, old
    before, found, after = text.rpartition(old)  # the last one: a name in the text may contain the same words
    return before + new + after if found else text


def without_paths(text: str) -> str:
    """Shorten paths of the server's files, so that clients do not learn where it stores them.

    >>> without_paths("[Errno 5] error: '/srv/my data/topics/default/jobs-1/segments/7.seg' is bad")
    "[Errno 5] error: 'default/jobs-1/segments/7.seg' is bad"
    """
    text = _QUOTED_PATH.sub(lambda m: f"{m[1]}{_inner(m[2])}{m[1]}", text)
    return _PATH.sub(lambda m: _inner(m[0]), text)


def _inner(path: str) -> str:
    """Return the part of a path inside the data directory's topics, otherwise only the file's name."""
    _, found, rest = path.rpartition("/topics/")
    return rest if found else path.rstrip("/").rpartition("/")[2]


def to_metadata(error: HeaplineError) -> bytes:
    """Return `describe` as JSON that fits into metadata. Long lists are cut; answers carry them in full."""
    described = describe(error)
    data = json.dumps(described).encode()
    if len(data) > FACTS_BYTES_MAX:
        described["facts"] = {name: _shorten(value) for name, value in described["facts"].items()}
        described["text"] = described["text"][:500]
        data = json.dumps(described).encode()
    return data


def _shorten(value: Any) -> Any:
    return value[:LIST_MAX] if isinstance(value, list) else value[:500] if isinstance(value, str) else value


def rebuild(described: dict[str, Any], code: str = "UNKNOWN") -> HeaplineError:
    """Return the described exception: the same class with the same facts and text."""
    kind, facts = _BY_NAME.get(described.get("error", "")), described.get("facts") or {}
    text = str(described.get("text", ""))
    if kind is None or not isinstance(facts, dict) or any(name not in facts for name in kind.fields):
        return of_code(code, text)
    return _make(kind, text, {name: facts[name] for name in kind.fields})


def from_metadata(data: bytes, code: str, text: str) -> HeaplineError:
    try:
        described = json.loads(data)
    except ValueError:
        described = None
    return rebuild(described, code) if isinstance(described, dict) else of_code(code, text)


def of_code(code: str, text: str) -> HeaplineError:
    """Return an error of which only the code is known."""
    kind = BRANCHES.get(code, HeaplineError)
    return _make(kind, text or code, dict.fromkeys(kind.fields))


def _make(kind: type[HeaplineError], text: str, facts: dict[str, Any]) -> HeaplineError:
    """Create an error without calling its constructor, which would compose the text again."""
    error = kind.__new__(kind)
    error.args = (text,)
    error.__dict__.update(facts)
    return error
