"""Calls as values: every call is a frozen struct, registered with the facts that the rest of the system reads.

A `Command` has one answer, a `Feed` has many. What a call needs to know about itself (its number and name on each
interface, the right it requires, whether it may be repeated) is declared once, here, and never listed anywhere else.
Checks on construction come from the fields' types and bounds (check.py); a check that needs a topic's settings belongs
to the handler. A `Context` accompanies a call through every `do`, into the engine and across processes.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform, get_args

import msgspec
from msgspec import Struct

from heapline.contract.check import compile_check
from heapline.contract.errors import BadRequest

R = TypeVar("R")
K = TypeVar("K")
C = TypeVar("C", bound="type[Call[Any]]")
PAGE_BYTES = 1 << 20  # of the items of a page in msgpack; a page has at least one item


class Right(Enum):
    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


class Repeat(Enum):
    """Whether a client may send a call again when its answer was lost."""

    SAFE = "safe"  # as often as needed; the last try counts
    KEYED = "keyed"  # carries a sequence or request id, so it counts once
    SETTLES = "settles"  # acts on a lease or a state; the client reconciles what a doubtful repeat reports
    ONCE = "once"  # never again once it may have reached the server


class Access(Struct, frozen=True):
    """One right that a call needs."""

    right: Right | None  # None: any right at all
    on: str = "topic"  # the field that names the topic; "shares.topic" for each row of a list; "" for all topics


class Facts(Struct, frozen=True, kw_only=True):
    """Everything that interfaces, gate, router and wrappers need to know about a call."""

    id: int  # on the native wire; never reused
    rpc: str  # on gRPC, in metrics, spans and the audit log
    http: str | None = None  # "POST /v1/heaps/{topic}:pause"; fields that are not in the path are in body or query
    needs: tuple[Access, ...] = ()
    rows: Access | None = None  # the answer omits rows without this right
    lookup: str | None = None  # rpc of the call whose answer, for the same arguments, has the fields named in `needs`
    repeat: Repeat = Repeat.SAFE
    feature: str = "queue"
    route: Literal["topic", "batch", "schedule", "replay", "sink", "system", "all"] = "topic"  # who answers it
    merge: Literal["pages", "sum", "series"] | None = None  # how answers of several shards become one; route "all"
    waits: bool = False  # may wait long for something to happen
    leases: bool = False  # the answer grants leases, which must be released if no caller receives it
    destroys: bool = False  # cannot be undone, so it needs a confirmation
    audit: tuple[str, ...] | None = None  # the fields that its audit line shows; None: no line
    status: int = 200  # of a successful HTTP response


class Context(Struct, frozen=True, gc=False):
    principal: str | None = None  # who calls; None: the process that opened the broker
    deadline: float | None = None  # in the running loop's time; crosses the wire as the seconds that are left
    trace: str | None = None  # W3C traceparent
    confirmation: str | None = None  # token of an earlier refusal, for calls that destroy
    forwarded: bool = False  # by a node that has already checked rights and limits and written the audit line
    claimed_at: Mapping[str, int] | None = None  # by topic: when a namespace's broker claimed its idempotency keys, ms
    leases_max: int | None = None  # leases that one holder may have on the topic; set by a server, enforced in the turn


#: The process that opened the broker, without a deadline.
HERE = Context()


@dataclass_transform(frozen_default=True)
class Call(Struct, Generic[R], frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    facts: ClassVar[Facts]
    result: ClassVar[Any]
    _check: ClassVar[Callable[[Any], None]]

    def __post_init__(self) -> None:
        self._check()


class Command(Call[R], Generic[R]):
    """A call with one answer."""


class Feed(Call[R], Generic[R]):
    """A call with many answers, within credits."""


#: Every call by its number, and by its rpc name.
CALLS: dict[int, type[Call[Any]]] = {}
BY_RPC: dict[str, type[Call[Any]]] = {}


def call(*, needs: Right | tuple[Access, ...] | None = None, **facts: Any) -> Callable[[C], C]:
    """Register a call. `needs=Right.X` means that right on the command's topic."""
    if isinstance(needs, Right):
        needs = (Access(needs),)

    def register(kind: C) -> C:
        kind.facts = Facts(needs=needs or (), **facts)
        kind.result = get_args(kind.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        kind._check = _check_later(kind)
        if CALLS.setdefault(kind.facts.id, kind) is not kind or BY_RPC.setdefault(kind.facts.rpc, kind) is not kind:
            raise TypeError(
                f"{kind.__name__} has the id {kind.facts.id:#x} or the name {kind.facts.rpc} of another call"
            )
        return kind

    return register


def call_family(**shared: Any) -> Callable[..., Callable[[C], C]]:
    """Return `call` with facts that several calls share; each call may override them."""
    return partial(call, **shared)


def _check_later(kind: type[Call[Any]]) -> Callable[[Any], None]:
    """Compile the check when the first command of its kind is made: at import it would cost 1 ms for each."""

    def check(command: Any) -> None:
        kind._check = compile_check(kind)
        kind._check(command)

    return check


class Count(Struct, frozen=True):
    """The number of messages, rows or parts that a call was about."""

    count: int


class Page(Struct, Generic[R], frozen=True, omit_defaults=True):
    """A part of a list. `cursor` is opaque; pass it to the next call. It is absent on the last page."""

    items: list[R]
    cursor: str | None = None


def cursor_of(value: Any) -> str:
    """Return an opaque cursor that encodes a value."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(value)).decode().rstrip("=")


def read_cursor(cursor: str | None, kind: Any, first: R) -> R:
    if cursor is None:
        return first
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.msgpack.decode(raw, type=kind)  # type: ignore[no-any-return]
    except (ValueError, msgspec.DecodeError):
        raise BadRequest(f"cursor must be one that the previous page returned, got {cursor!r}") from None


class PageBuilder(Generic[R]):
    """Collects the items of a page until it has `limit` of them or PAGE_BYTES."""

    def __init__(self, limit: int) -> None:
        self.items: list[R] = []
        self._limit, self._room = limit, PAGE_BYTES

    def add(self, item: R) -> bool:
        """Add an item. Return False, without adding it, if the page is full."""
        self._room -= len(msgspec.msgpack.encode(item))
        if self.items and (len(self.items) >= self._limit or self._room < 0):
            return False
        self.items.append(item)
        return True


def page_of(
    items: Iterable[K],
    cursor: str | None,
    limit: int,
    key: Callable[[K], Any] = attrgetter("name"),
    kind: Any = str,
    shape: Callable[[K], Any] | None = None,
) -> Page[Any]:
    """Return one page of a list, ordered by a key of type `kind`. `shape` makes the answer's items."""
    rest = sorted(items, key=key)
    if cursor is not None:
        rest = rest[bisect_right(rest, read_cursor(cursor, kind, None), key=key) :]
    page: PageBuilder[Any] = PageBuilder(limit)
    for i, item in enumerate(rest):
        if not page.add(item if shape is None else shape(item)):
            return Page(page.items, cursor_of(key(rest[i - 1])))
    return Page(page.items)


async def read_page(
    names: Sequence[str], cursor: str | None, limit: int, read: Callable[[str], Awaitable[R | None]]
) -> Page[R]:
    """Return one page of what `read` returns for each of these sorted names. Names with None are omitted."""
    page: PageBuilder[R] = PageBuilder(limit)
    for i in range(bisect_right(names, read_cursor(cursor, str, "")), len(names)):
        item = await read(names[i])
        if item is not None and not page.add(item):
            return Page(page.items, cursor_of(names[i - 1]))
    return Page(page.items)
