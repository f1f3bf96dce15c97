"""`assert_enqueued`: assert that a message was enqueued. The failure lists the messages that are in the topic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from heapline.contract.config import DEFAULT_NAMESPACE, parse_topic
from heapline.contract.message import MessageInfo
from heapline.testing.memory import MemoryBroker, SyncMemoryBroker

ANY: Any = type("Anything", (), {"__repr__": lambda self: "ANY"})()  # placeholder for a field that is not compared
SHOWN_MAX = 20  # messages listed in a failure
PAYLOAD_SHOWN = 200  # bytes
WAITING = ("ready", "delayed")


def assert_enqueued(
    broker: MemoryBroker | SyncMemoryBroker, topic: str, payload: Any = ANY, *, priority: int = ANY,
    key: str | None = ANY, headers: Mapping[str, str] = ANY, count: int | None = None,
    match: Callable[[MessageInfo], Any] | None = None,
) -> list[MessageInfo]:  # fmt: skip
    """Return the waiting messages (ready or delayed) of a topic that match all arguments; fail if there are none.

    `payload` is compared directly if it is bytes, and as JSON otherwise. `headers` must be present; others may be too.
    `match` receives the complete message. `count` is how many must match; 0 asserts that none does.

    >>> with memory_broker_sync() as hl:
    ...     _ = hl.create_topic("mail")
    ...     _ = hl.enqueue("mail", b'{"to": "ada"}', priority=5, delay=60)
    ...     [info] = assert_enqueued(hl, "mail", {"to": "ada"}, priority=5)
    ...     info.state
    'delayed'
    """
    __tracebackhide__ = True
    known = broker.topic_names()
    namespace, name = parse_topic(topic)
    full = name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"
    if full not in known:
        raise AssertionError(f"topic {topic!r} does not exist; the topics are: {', '.join(known) or 'none'}")
    waiting = [info for info in broker.standing(topic) if info.state in WAITING]
    wanted = {"payload": payload, "priority": priority, "key": key, "headers": headers}
    wanted = {field: value for field, value in wanted.items() if value is not ANY}
    found = [info for info in waiting if all(_fits(info, f, v) for f, v in wanted.items())]
    if match is not None:
        found = [info for info in found if match(info)]
    if (len(found) == count) if count is not None else found:
        return found
    raise AssertionError(_failure(topic, wanted, match, count, len(found), waiting))


def _fits(info: MessageInfo, field: str, wanted: Any) -> bool:
    if field == "headers":
        return all(info.headers.get(name) == value for name, value in wanted.items())
    if field != "payload" or isinstance(wanted, bytes):
        return bool(getattr(info, field) == wanted)
    try:
        return bool(json.loads(info.payload or b"") == wanted)
    except ValueError:
        return False


def _failure(
    topic: str, wanted: dict[str, Any], match: Callable[..., Any] | None, count: int | None, found: int,
    waiting: list[MessageInfo],
) -> str:  # fmt: skip
    asked = [f"{field}={value!r}" for field, value in wanted.items()]
    asked += [f"match={getattr(match, '__name__', match)}"] if match is not None else []
    fitting = f" with {', '.join(asked)}" if asked else ""
    if count is None:
        said = f"no message{fitting} was enqueued in {topic!r}"
    else:
        said = f"{count} wanted, but {found} found: messages{fitting} in {topic!r}"
    if not waiting:
        return f"{said}; nothing waits there"
    lines = [_line(info) for info in waiting[:SHOWN_MAX]]
    if len(waiting) > SHOWN_MAX:
        lines.append(f"and {len(waiting) - SHOWN_MAX} more")
    return "\n  ".join([f"{said}; what waits there ({len(waiting)}):", *lines])


def _line(info: MessageInfo) -> str:
    payload = info.payload or b""
    shown = repr(payload[:PAYLOAD_SHOWN]) + ("…" if len(payload) > PAYLOAD_SHOWN else "")
    parts = [f"payload={shown}", f"priority={info.priority}"]
    parts += [f"key={info.key!r}"] if info.key is not None else []
    parts += [f"headers={info.headers!r}"] if info.headers else []
    parts += [f"due {info.due_at:%Y-%m-%d %H:%M:%S}"] if info.state == "delayed" and info.due_at else []
    return f"{info.state}: {', '.join(parts)}"
