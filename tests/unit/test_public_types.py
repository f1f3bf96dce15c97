"""Public types: their forms, defaults and reprs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import heapline
from heapline.contract.ids import to_ulid
from heapline.contract.message import Enqueued, from_ms

ID, SUFFIX = 264905529753600000, 0x2AB_CDEF_0123_4567


class Recorder:
    """A broker that only records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.asked.append((name, *args, kwargs))

        return call


def message(broker: Any = None, **changes: Any) -> heapline.Message:
    facts: dict[str, Any] = {
        "topic": "jobs", "partition": 0, "id": ID, "token": 7, "payload": b"abc", "priority": 5, "attempts": 2,
        "key": None, "_headers": None, "_enqueued_ms": 1_767_225_600_000, "_deadline_ms": 1_767_225_630_000,
        "id_suffix": SUFFIX,
    }  # fmt: skip
    return heapline.Message(broker, **(facts | changes))


def row(**changes: Any) -> heapline.StreamMessage:
    facts: dict[str, Any] = {
        "topic": "jobs", "partition": 0, "offset": 3, "id": ID, "payload": b"abc", "priority": 5, "attempts": 2,
        "key": None, "_headers": None, "_enqueued_ms": 1_767_225_600_000, "id_suffix": SUFFIX,
    }  # fmt: skip
    return heapline.StreamMessage(None, **(facts | changes))


def test_instants_have_a_time_zone() -> None:
    assert from_ms(1_767_225_600_123) == datetime(2026, 1, 1, 0, 0, 0, 123000, tzinfo=UTC)
    m = message()
    assert m.enqueued_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert m.deadline - m.enqueued_at == timedelta(seconds=30)


def test_id_has_two_spellings_everywhere() -> None:
    info = heapline.MessageInfo(id=ID, topic="jobs", partition=0, state="ready", id_suffix=SUFFIX)
    letter = heapline.GroupDeadLetter(partition=0, offset=3, id=ID, attempts=1, reason="r", id_suffix=SUFFIX)
    for thing in (message(), row(), heapline.Enqueued(ID, id_suffix=SUFFIX), info, letter):
        assert (thing.id, thing.message_id) == (ID, to_ulid(ID, SUFFIX))
        assert to_ulid(ID, SUFFIX) in repr(thing)
        assert str(ID) not in repr(thing)


def test_repr_shows_set_fields_without_internals() -> None:
    ulid = to_ulid(ID, SUFFIX)
    info = heapline.MessageInfo(id=ID, topic="jobs", partition=0, state="ready", attempts=2, id_suffix=SUFFIX)
    assert repr(info) == f"MessageInfo({ulid}, topic='jobs', partition=0, state='ready', attempts=2)"
    assert repr(heapline.Enqueued(ID, id_suffix=SUFFIX)) == f"Enqueued({ulid})"
    assert repr(heapline.Enqueued(ID, True, id_suffix=SUFFIX)) == f"Enqueued({ulid}, duplicate)"
    assert repr(heapline.Enqueued(0, error=ValueError("x"))) == "Enqueued(error=ValueError('x'))"


@pytest.mark.parametrize("make", [message, row])
def test_message_and_row_can_be_read_alike(make: Callable[..., heapline.Message | heapline.StreamMessage]) -> None:
    assert make().headers == {}
    one = make(_headers={"a": "b"}, payload=b"[1, 2]")
    assert (one.headers, one.message_id) == ({"a": "b"}, to_ulid(ID, SUFFIX))
    assert one.enqueued_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert one.json() == one.decode(list[int]) == [1, 2]


@pytest.mark.parametrize("make", [message, row])
def test_message_and_row_are_small_and_can_be_sent_to_another_process(
    make: Callable[..., heapline.Message | heapline.StreamMessage],
) -> None:
    one = make(_headers={"a": "b"})
    assert not hasattr(one, "__dict__")
    with pytest.raises(AttributeError):
        one.note = "x"  # type: ignore[union-attr]
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one)):
        assert (again.id, again.payload, again.headers, again.attempts) == (ID, b"abc", {"a": "b"}, 2)


async def test_message_calls_its_own_broker() -> None:
    broker = Recorder()
    m = message(broker)
    await m.ack()
    await m.nack(backoff=1.5, reason="r")
    await m.nack()
    await m.release()
    await m.extend(30.0)
    await m.bury("b")
    assert broker.asked == [
        ("ack", m, {}), ("nack", m, {"backoff": 1.5, "reason": "r"}), ("nack", m, {"backoff": None, "reason": None}),
        ("release", m, {}), ("extend", m, 30.0, {}), ("bury", m, {"reason": "b"}),
    ]  # fmt: skip


def test_message_repr_omits_its_payload() -> None:
    shown = repr(message(payload=b"secret"))
    assert to_ulid(ID, SUFFIX) in shown
    assert all(part in shown for part in ("'jobs'", "priority 5", "attempt 2", "6 bytes"))
    assert "secret" not in shown


def test_outgoing_has_a_default_for_all_but_the_payload() -> None:
    out = heapline.Outgoing(b"a")
    names = out.__struct_fields__
    assert [getattr(out, name) for name in names] == [b"a", 0, *[None] * (len(names) - 2)]
    with pytest.raises(TypeError):
        heapline.Outgoing()  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        out.priority = 3  # type: ignore[misc]


def test_enqueue_result_defaults_to_new_without_error() -> None:
    assert (heapline.Enqueued(ID).duplicate, heapline.Enqueued(ID).error) == (False, None)


def test_errors_carry_their_facts_and_say_what_to_do() -> None:
    error = heapline.LeaseLost([1, 2, 3, 4], "jobs")
    assert error.facts() == {"lost": [1, 2, 3, 4], "topic": "jobs"}
    assert "4 message(s)" in str(error)
    assert heapline.ResourceExhausted("max_backlog", 5).facts() == {"what": "max_backlog", "limit": 5}
    assert heapline.PayloadTooLarge(9, 8, "jobs").facts() == {"size": 9, "limit": 8, "topic": "jobs"}


@pytest.mark.parametrize(
    "error",
    [
        heapline.LeaseLost([1], "jobs"), heapline.Closed(), heapline.StorageFull(), heapline.BadRequest("why"),
        heapline.TopicExists("jobs", ["mode"]), heapline.JournalCorrupt("x.seg", 5, "torn"),
        heapline.IdempotencyConflict("key", "id"), heapline.CorruptionError("text"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_errors_can_be_pickled(error: heapline.HeaplineError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), again.facts()) == (type(error), str(error), error.facts())


def test_branches_say_what_the_caller_should_do() -> None:
    branches = {
        heapline.RequestError: ("BadRequest", "BadName", "PayloadTooLarge", "TopicNotFound", "TopicExists",
                                "MessageNotFound", "Closed"),
        heapline.ConflictError: ("LeaseLost", "StaleEpoch", "StaleSequence", "IdempotencyConflict", "MessageLeased",
                                 "DirectoryLocked"),
        heapline.UnavailableError: ("ResourceExhausted", "StorageFull", "TopicReloading", "DeadlineExceeded"),
        heapline.CorruptionError: ("JournalCorrupt", "SnapshotCorrupt", "RecordCorrupt", "UnknownFormat"),
    }  # fmt: skip
    for branch, leaves in branches.items():
        assert issubclass(branch, heapline.HeaplineError)
        for leaf in leaves:
            assert issubclass(getattr(heapline, leaf), branch)


def test_result_that_holds_an_error_is_freed() -> None:
    """An error refers to the frames that it passed, and these to the answer: a cycle that only the collector frees."""

    class Large:
        pass

    def failing() -> weakref.ref[Large]:
        large = Large()
        try:
            raise ValueError
        except ValueError as error:
            answers = [Enqueued(0, error=error)]
        assert answers
        return weakref.ref(large)

    kept = failing()
    gc.collect()
    assert kept() is None
