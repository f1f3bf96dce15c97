"""The client's own sequence numbers: assigned once, closed with their call, renewed if another client used them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.client.wrappers.idempotent import Idempotent
from heapline.contract.call import Context
from heapline.contract.errors import (
    DeadlineExceeded,
    HeaplineError,
    IdempotencyConflict,
    PayloadTooLarge,
    StaleEpoch,
    StaleSequence,
    TopicReloading,
)
from heapline.contract.message import Enqueued, Outgoing
from heapline.contract.messages import Enqueue, EnqueueBatch, EnqueuedBatch, enqueued, pack_enqueued, pack_messages
from tests.simulation.loop import run


class Server:
    """Answers from a script: an error, results, or by default new ids."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests: list[Any] = []

    async def do(self, command: EnqueueBatch, context: Context) -> EnqueuedBatch:
        assert type(command) is EnqueueBatch
        self.requests.append(command)
        answer = self.script.pop(0) if self.script else None
        await asyncio.sleep(0.01)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            answer = [Enqueued(100 + i) for i in range(len(command.messages))]
        return pack_enqueued(answer, 0)

    @property
    def sent(self) -> list[tuple[list[int], int | None]]:
        sent: list[tuple[list[int], int | None]] = []
        for r in self.requests:
            assert r.messages.seqs is None
            sent.append((list(range(r.first_seq, r.first_seq + len(r.messages))), r.answered_below))
        return sent

    @property
    def names(self) -> list[str | None]:
        return [r.producer_id for r in self.requests]


def batch(*payloads: bytes, **options: Any) -> list[Outgoing]:
    return [Outgoing(p, **options) for p in payloads]


class Numbered:
    """The wrapper, with a helper to enqueue messages."""

    def __init__(self, server: Server) -> None:
        self._wrapper = Idempotent(server, 30.0)

    async def send(self, messages: list[Outgoing], atomic: bool, until: float) -> list[Enqueued]:
        command = EnqueueBatch("jobs", pack_messages(messages), atomic)
        return enqueued(await self._wrapper.do(command, Context(deadline=until)))

    async def send_joined(self, batches: list[list[Outgoing]], until: float) -> list[list[Enqueued] | Exception]:
        packed = [pack_messages(messages) for messages in batches]
        found = await self._wrapper.open_producer("jobs").enqueue_each(packed, Context(deadline=until))
        return [one if isinstance(one, Exception) else enqueued(one) for one in found]


def numbered(server: Server) -> Numbered:
    return Numbered(server)


def test_sequences_rise_and_answered_below_follows() -> None:
    server = Server()

    async def go() -> None:
        numbers = numbered(server)
        await asyncio.gather(*(numbers.send(batch(b"a", b"b"), True, 30.0) for _ in range(2)))
        await numbers.send(batch(b"c", key="k"), False, 30.0)

    run(go())
    assert server.sent == [([0, 1], 0), ([2, 3], 0), ([4], 4)]
    assert [r.atomic for r in server.requests] == [True, True, False]
    assert len(set(server.names)) == 1
    assert all(r.epoch == 1 for r in server.requests)


def test_numbers_of_a_call_that_failed_are_not_kept_open() -> None:
    server = Server(DeadlineExceeded("x"))

    async def go() -> None:
        numbers = numbered(server)
        with pytest.raises(DeadlineExceeded):
            await numbers.send(batch(b"a"), True, 30.0)
        await numbers.send(batch(b"b"), True, 30.0)

    run(go())
    assert server.sent == [([0], 0), ([1], 1)]


def test_rows_in_doubt_are_resent_under_the_same_sequences() -> None:
    reloading = Enqueued(0, error=TopicReloading("jobs", "x"))
    server = Server([Enqueued(1), reloading], [Enqueued(1, True), Enqueued(2, True)])
    results = run(numbered(server).send(batch(b"a", b"b"), False, 30.0))
    assert results == [Enqueued(1), Enqueued(2)]
    assert server.sent == [([0, 1], 0), ([0, 1], 0)]


def test_duplicate_by_key_is_reported_as_a_duplicate() -> None:
    server = Server([Enqueued(1, True)])
    assert run(numbered(server).send(batch(b"a", idempotency_key="k"), True, 30.0)) == [Enqueued(1, True)]


def test_rows_that_stay_in_doubt_until_the_deadline_say_so() -> None:
    reloading = Enqueued(0, error=TopicReloading("jobs", "x"))
    server = Server(*([reloading] for _ in range(100)))
    (result,) = run(numbered(server).send(batch(b"a"), False, 5.0))
    assert isinstance(result.error, TopicReloading)


@pytest.mark.parametrize(
    "error",
    [
        StaleEpoch("sdk-x", 1, 2), StaleSequence("sdk-x", 0, 5), IdempotencyConflict("sequence 0", "01ABC"),
    ],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
@pytest.mark.parametrize("atomic", [True, False])
def test_numbers_that_another_has_used_up_are_replaced_under_a_new_name(error: HeaplineError, atomic: bool) -> None:
    server = Server(error if atomic else [Enqueued(1), Enqueued(0, error=error)])

    async def go() -> list[Enqueued]:
        numbers = numbered(server)
        results = await numbers.send(batch(b"a", b"b"), atomic, 30.0)
        await numbers.send(batch(b"c"), True, 30.0)
        return results

    assert [r.id for r in run(go())] == ([100, 101] if atomic else [1, 100])
    first, again, later = server.requests
    assert first.producer_id != again.producer_id == later.producer_id
    assert [seqs for seqs, _ in server.sent] == ([[0, 1], [0, 1], [2]] if atomic else [[0, 1], [0], [1]])
    assert len(again.messages) == (2 if atomic else 1), "only refused messages are sent again"


@pytest.mark.parametrize("error", [StaleEpoch("sdk-x", 1, 2), StaleSequence("sdk-x", 0, 5)])
def test_sequences_in_doubt_are_never_replaced(error: HeaplineError) -> None:
    error.repeated = True
    server = Server(error)
    with pytest.raises(type(error)):
        run(numbered(server).send(batch(b"a"), True, 30.0))
    assert len(server.requests) == 1


def test_new_producer_name_is_tried_only_once() -> None:
    server = Server(StaleSequence("x", 0, 5), StaleSequence("y", 0, 5))
    with pytest.raises(StaleSequence):
        run(numbered(server).send(batch(b"a"), True, 30.0))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "error", [PayloadTooLarge(5, 1, "jobs"), IdempotencyConflict("idempotency key 'k'", "01ABC")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_other_refusals_are_raised_to_the_caller(error: HeaplineError) -> None:
    server = Server(error)
    with pytest.raises(type(error)):
        run(numbered(server).send(batch(b"a"), True, 30.0))
    assert len(server.requests) == 1


def test_non_atomic_batch_is_split_to_the_servers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.client.wrappers.idempotent.BATCH_BYTES", 10)
    server = Server()
    results = run(numbered(server).send(batch(*[b"12345"] * 5), False, 30.0))
    assert len(results) == 5
    assert [len(seqs) for seqs, _ in server.sent] == [2, 1, 2]


# -- single messages ---------------------------------------------------------------------------------------------------


class SingleServer:
    """Answers single messages from a script: an error, or a result."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests: list[Enqueue] = []

    async def do(self, command: Enqueue, context: Context) -> Enqueued:
        assert type(command) is Enqueue
        self.requests.append(command)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def enqueue_singly(server: SingleServer, *commands: Enqueue) -> list[Enqueued]:
    wrapper = Idempotent(server, 30.0)

    async def go() -> list[Enqueued]:
        return [await wrapper.do(command, Context(deadline=30.0)) for command in commands]

    return run(go())


def test_single_messages_are_numbered_under_one_name() -> None:
    server = SingleServer(Enqueued(1), Enqueued(2))
    assert enqueue_singly(server, Enqueue("jobs", b"a"), Enqueue("jobs", b"b", priority=3)) == [
        Enqueued(1),
        Enqueued(2),
    ]
    assert [(r.payload, r.priority, r.epoch, r.seq, r.answered_below) for r in server.requests] == [
        (b"a", 0, 1, 0, 0), (b"b", 3, 1, 1, 1),
    ]  # fmt: skip
    assert len({r.producer_id for r in server.requests}) == 1


def test_single_message_is_a_duplicate_only_by_its_key() -> None:
    commands = Enqueue("jobs", b"a"), Enqueue("jobs", b"a", idempotency_key="k")
    found = enqueue_singly(SingleServer(Enqueued(1, True), Enqueued(1, True)), *commands)
    assert [result.duplicate for result in found] == [False, True], "the first is a repeat of this very call"


@pytest.mark.parametrize("error", [StaleEpoch("sdk-x", 1, 2), StaleSequence("sdk-x", 0, 5)])
def test_number_of_a_single_message_that_another_has_used_is_replaced_once(error: HeaplineError) -> None:
    server = SingleServer(error, Enqueued(1), Enqueued(2))
    enqueue_singly(server, Enqueue("jobs", b"a"), Enqueue("jobs", b"b"))
    first, again, later = server.requests
    assert first.producer_id != again.producer_id == later.producer_id
    assert [(r.payload, r.seq) for r in server.requests] == [(b"a", 0), (b"a", 0), (b"b", 1)]
    twice = SingleServer(StaleSequence("x", 0, 5), StaleSequence("y", 0, 5))
    with pytest.raises(StaleSequence):
        enqueue_singly(twice, Enqueue("jobs", b"a"))
    assert len(twice.requests) == 2


def test_number_of_a_single_message_in_doubt_is_never_replaced() -> None:
    error = StaleSequence("sdk-x", 0, 5)
    error.repeated = True
    with pytest.raises(StaleSequence):
        enqueue_singly(server := SingleServer(error), Enqueue("jobs", b"a"))
    assert len(server.requests) == 1


# -- several callers' batches in one call ------------------------------------------------------------------------------


def test_joined_batches_get_their_own_results() -> None:
    server = Server()
    assert run(numbered(server).send_joined([batch(b"a", b"b"), batch(b"c")], 30.0)) == [
        [Enqueued(100), Enqueued(101)], [Enqueued(102)],
    ]  # fmt: skip
    assert server.sent == [([0, 1, 2], 0)]


def test_rejected_batch_fails_no_other() -> None:
    refused = PayloadTooLarge(5, 1, "jobs")
    server = Server(refused, None, refused)
    good, bad = run(numbered(server).send_joined([batch(b"a"), batch(b"b")], 30.0))
    assert good == [Enqueued(100)]
    assert isinstance(bad, PayloadTooLarge)


def test_batch_that_cannot_be_sent_alone_fails_only_its_own_caller() -> None:
    refused = PayloadTooLarge(5, 1, "jobs")
    server = Server(refused, DeadlineExceeded("x"), None)
    late, good = run(numbered(server).send_joined([batch(b"a"), batch(b"b")], 30.0))
    assert isinstance(late, DeadlineExceeded)
    assert good == [Enqueued(100)]


def test_rejected_batches_in_doubt_are_resent_under_their_sequences() -> None:
    refused = IdempotencyConflict("idempotency key 'k'", "01ABC")
    refused.repeated = True
    server = Server(refused, [Enqueued(7, True), Enqueued(8, True)], refused)

    async def go() -> list[Any]:
        numbers = numbered(server)
        results = await numbers.send_joined([batch(b"a", b"b"), batch(b"c", idempotency_key="k")], 30.0)
        await numbers.send(batch(b"d"), True, 30.0)
        return results

    good, bad = run(go())
    assert good == [Enqueued(7), Enqueued(8)], "it was already stored, but its caller did not repeat it"
    assert isinstance(bad, IdempotencyConflict)
    assert server.sent == [([0, 1, 2], 0), ([0, 1], 0), ([2], 0), ([3], 3)]
    assert len(set(server.names)) == 1


def test_failed_part_of_a_batch_reports_only_its_own_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("heapline.client.wrappers.idempotent.BATCH_BYTES", 10)
    server = Server(None, DeadlineExceeded("x"))
    results = run(numbered(server).send(batch(*[b"12345"] * 4), False, 30.0))
    assert [r.id for r in results] == [100, 101, 0, 0]
    assert [type(r.error) for r in results[2:]] == [DeadlineExceeded] * 2
