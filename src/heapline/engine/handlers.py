"""The table of handlers, and their shared helpers: pages and cursors."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from heapline.contract.call import Call, Command, Context, Feed, Page
from heapline.contract.errors import BadRequest
from heapline.engine.topics import TopicKeeper

R = TypeVar("R")
Handler = Callable[[TopicKeeper, Any, Context], Awaitable[R]]
FeedHandler = Callable[[TopicKeeper, Any, Context], AsyncIterator[R]]
HANDLERS: dict[type[Call[Any]], Handler[Any]] = {}
FEEDS: dict[type[Call[Any]], FeedHandler[Any]] = {}


def handles(kind: Callable[..., Command[R]]) -> Callable[[Handler[R]], Handler[R]]:
    """Register a handler. mypy checks that it returns what the command promises."""

    def register(handler: Handler[R]) -> Handler[R]:
        assert isinstance(kind, type)
        HANDLERS[kind] = handler
        return handler

    return register


def feeds(kind: Callable[..., Feed[R]]) -> Callable[[FeedHandler[R]], FeedHandler[R]]:
    """Register the handler of a feed: an async generator of its items."""

    def register(handler: FeedHandler[R]) -> FeedHandler[R]:
        assert isinstance(kind, type)
        FEEDS[kind] = handler
        return handler

    return register


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


def page_by_name(items: Sequence[Any], cursor: str | None, limit: int, name: str = "name") -> Page[Any]:
    """Return one page of a list that is sorted by a name."""
    after = read_cursor(cursor, str, "")
    rest = [item for item in items if getattr(item, name) > after] if after else list(items)
    chosen = rest[:limit]
    return Page(chosen, cursor_of(getattr(chosen[-1], name)) if len(rest) > limit else None)
