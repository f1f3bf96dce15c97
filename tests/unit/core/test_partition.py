"""The partition's promises, one by one.

Each test drives a real partition and the naive one together (`partition_rig`): a command with a different outcome
fails immediately, and `check` compares everything else.
"""

from __future__ import annotations

import numpy as np
import pytest

from heapline.contract.config import Aging
from heapline.contract.message import Outgoing, from_ms
from heapline.core.dedup.idempotency import key_hash
from heapline.core.dedup.verdict import CONFLICT, DUPLICATE, NEW
from heapline.core.events import (
    Expired,
    Fired,
    LeaseExpired,
)  # fmt: skip
from heapline.core.leases import DEADLINE, POSITION
from tests.unit.core.naive import AGING_RATE
from tests.unit.core.partition_rig import Rig
from tests.unit.core.rig_journal import START

SECOND, DAY = 1000, 86_400_000


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_max_retries_3_is_at_most_4_deliveries_and_the_first_attempt_is_1() -> None:
    rig = Rig(max_retries_default=16)
    (a,) = rig.enqueue(Outgoing(b"", max_retries=3))
    attempts = []
    while rig.state_of(a) != "dead":
        assert rig.pop() == [a]
        attempts.append(rig.p.entries.leases.by_id[a][POSITION] & 255)
        rig.nack(a, backoff=0, reason="boom")
    assert attempts == [1, 2, 3, 4]
    assert rig.p.entries.dead[a].reason == "boom"
    rig.everywhere()


def test_lease_timeouts_count_as_deliveries() -> None:
    rig = Rig(max_retries_default=1)
    (a,) = rig.enqueue(Outgoing(b""))
    for _ in range(2):
        assert rig.pop(visibility=SECOND) == [a]
        rig.advance(DAY)
        rig.tick()
        rig.advance(DAY)
        rig.tick()
    assert rig.p.entries.dead[a].reason == "lease expired"
    rig.everywhere()


def test_topic_without_dlq_drops_dead_messages_and_reports_it() -> None:
    rig = Rig(dlq=False, max_retries_default=0)
    (a,) = rig.enqueue(Outgoing(b""))
    rig.pop()
    rig.nack(a, reason="boom")
    assert rig.p.state.gone.find(a) == ("dropped", START, "boom")
    rig.everywhere()


def test_released_message_is_ready_immediately_without_an_attempt() -> None:
    rig = Rig(max_retries_default=0)
    (a,) = rig.enqueue(Outgoing(b""))
    for _ in range(5):
        assert rig.pop() == [a]
        assert rig.p.entries.leases.by_id[a][POSITION] & 255 == 1
        rig.release(a)
    rig.everywhere()


def test_expired_lease_returns_message_at_original_priority() -> None:
    rig = Rig()
    a, b, c = rig.enqueue(Outgoing(b"", priority=1), Outgoing(b"", priority=2), Outgoing(b"", priority=3))
    assert rig.pop(visibility=SECOND) == [a]
    rig.advance(SECOND)
    (event,) = rig.tick()
    assert isinstance(event, LeaseExpired)
    rig.advance_to(a)
    rig.tick()
    assert rig.pop(3) == [a, b, c]


@pytest.mark.parametrize("wall", [False, True])
def test_ttl_counts_from_the_due_time(wall: bool) -> None:
    rig = Rig()
    due = {"deliver_at": from_ms(rig.now.wall + DAY)} if wall else {"delay": 86400}
    (a,) = rig.enqueue(Outgoing(b"", ttl=1, **due))
    rig.advance_to(a)
    (fired,) = rig.tick()
    assert isinstance(fired, Fired)
    rig.advance(SECOND - 1)
    assert rig.tick() == []
    rig.advance(1)
    (ended,) = rig.tick()
    assert isinstance(ended, Expired)
    rig.everywhere()


@pytest.mark.parametrize("how", ["nack", "release", "timeout"])
def test_leased_message_expires_only_when_its_lease_ends(how: str) -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", ttl=1))
    rig.pop(visibility=60 * SECOND)
    rig.advance(2 * SECOND)
    rig.tick()
    assert rig.state_of(a) == "leased"
    rig.everywhere()
    rig.restart(rig.replayed())
    if how == "nack":
        rig.nack(a)
    elif how == "release":
        rig.release(a)
    else:
        rig.advance(60 * SECOND)
        rig.tick()
    assert rig.state_of(a) == "expired"
    rig.everywhere()


def test_leased_message_whose_ttl_has_ended_can_still_be_acked_or_buried() -> None:
    rig = Rig()
    a, b = rig.enqueue(Outgoing(b"", ttl=1), Outgoing(b"", ttl=1))
    rig.pop(2)
    rig.advance(2 * SECOND)
    rig.tick()
    assert rig.ack(a) == []
    assert rig.bury(b) == []
    assert (rig.state_of(a), rig.state_of(b)) == ("acked", "dead")
    rig.everywhere()


def test_message_that_waits_for_a_retry_expires() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", ttl=1))
    rig.pop()
    rig.nack(a, backoff=DAY)
    rig.advance(SECOND)
    rig.tick()
    assert rig.state_of(a) == "expired"
    rig.advance(DAY)
    assert rig.tick() == []
    rig.everywhere()


def test_extend_sets_the_deadline_never_shortens_and_never_passes_lease_max() -> None:
    rig = Rig(lease_max=60.0)
    (a,) = rig.enqueue(Outgoing(b""))
    rig.pop(visibility=30 * SECOND)
    deadlines = []
    for by in (10 * SECOND, 40 * SECOND, 5 * SECOND, DAY):
        rig.extend(a, by=by)
        deadlines.append(rig.p.entries.leases.by_id[a][DEADLINE] - START)
    assert deadlines == [30 * SECOND, 40 * SECOND, 40 * SECOND, 60 * SECOND]
    rig.advance(60 * SECOND - 1)
    assert rig.tick() == []
    rig.advance(1)
    assert len(rig.tick()) == 1
    rig.everywhere()


def test_ack_of_many_acks_all_it_can_and_names_the_lost() -> None:
    rig = Rig()
    a, b, c = rig.enqueue(Outgoing(b""), Outgoing(b""), Outgoing(b""))
    rig.pop(3)
    tokens = [rig.token(id) for id in (a, b, c)]
    rig.nack(b)
    assert rig.ack(a, b, c, tokens=tokens) == [b]
    assert [rig.state_of(id) for id in (a, b, c)] == ["acked", "delayed", "acked"]
    rig.everywhere()


def test_ack_before_the_lease_expiry_is_recorded_succeeds() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b""))
    rig.pop(visibility=SECOND)
    rig.advance(DAY)
    assert rig.ack(a) == []
    assert rig.tick() == []
    rig.everywhere()


def test_repeated_ack_succeeds_even_after_a_restart() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b""))
    rig.pop()
    token = rig.token(a)
    rig.ack(a)
    rig.take_snapshot()
    for topic in (rig.topic, rig.replayed(), rig.thawed()):
        rig.restart(topic)
        assert rig.ack(a, tokens=[token]) == []
        assert rig.ack(a, tokens=[token + 1]) == [a]


def test_stale_token_changes_nothing() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b""))
    rig.pop(visibility=SECOND)
    stale = rig.token(a)
    rig.advance(SECOND)
    rig.tick()
    rig.advance_to(a)
    rig.tick()
    rig.pop()
    for command in (rig.ack, rig.nack, rig.release, rig.bury):
        assert command(a, tokens=[stale]) == [a]
    assert rig.extend(a, tokens=[stale], by=DAY) == [a]
    assert rig.state_of(a) == "leased"
    rig.check()
    assert rig.ack(a) == []


def test_repeated_pop_finds_its_leases_by_request_id() -> None:
    rig = Rig()
    a, b, _ = rig.enqueue(Outgoing(b""), Outgoing(b""), Outgoing(b""))
    rig.pop(2, request="r")
    rig.take_snapshot()
    for topic in (rig.topic, rig.replayed(), rig.thawed()):
        assert topic.partitions[0].entries.leases.request("r0") == [a, b]
    rig.release(a)
    assert rig.p.entries.leases.request("r0") == [b]
    rig.pop(2)  # leased again, but under another lease
    assert rig.p.entries.leases.request("r0") == [b]


def test_reschedule_keeps_fields_that_are_not_given() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", priority=7, delay=10, ttl=5))
    before = rig.model.messages[a].due
    rig.reschedule(a, priority=3)
    found = rig.p.entries.find(a)
    assert found is not None
    assert (found.due, found.key) == (before, 3)
    rig.reschedule(a, due=rig.now.steady + DAY)
    found = rig.p.entries.find(a)
    assert found is not None
    assert (found.due, found.key) == (rig.now.steady + DAY, 3)
    rig.everywhere()


def test_cancelled_message_is_never_delivered() -> None:
    rig = Rig()
    a, b = rig.enqueue(Outgoing(b""), Outgoing(b"", delay=1))
    assert rig.cancel(a)
    assert rig.cancel(b)
    rig.advance(DAY)
    assert rig.tick() == []
    assert rig.pop(5) == []
    rig.everywhere()


def test_cancel_and_reschedule_do_not_change_leased_dead_or_removed_messages() -> None:
    rig = Rig()
    a, b, c = rig.enqueue(Outgoing(b""), Outgoing(b""), Outgoing(b""))
    rig.pop(3)
    rig.bury(b)
    rig.ack(c)
    for id in (a, b, c):
        assert not rig.cancel(id)
        assert not rig.reschedule(id, priority=1)
    assert rig.p.entries.find(12345) is None


def test_dlq_replay_resets_attempts_and_restarts_ttl() -> None:
    rig = Rig()
    (a,) = rig.enqueue(Outgoing(b"", ttl=10, max_retries=0))
    rig.pop()
    rig.nack(a)
    rig.advance(DAY)
    rig.tick()
    assert rig.state_of(a) == "dead", "dead letters do not expire"
    rig.replay_dead([a])
    rig.everywhere()
    rig.advance(10 * SECOND - 1)
    assert rig.tick() == []
    rig.pop()
    assert rig.p.entries.leases.by_id[a][POSITION] & 255 == 1
    rig.release(a)
    rig.advance(1)
    rig.tick()
    assert rig.state_of(a) == "expired"
    rig.everywhere()


def test_dlq_replay_ignores_dedup() -> None:
    rig = Rig(max_retries_default=0)
    (a,) = rig.enqueue(Outgoing(b"x", idempotency_key="k", idempotency_scope="until_ack"))
    rig.pop()
    rig.nack(a)
    assert rig.enqueue(Outgoing(b"x", idempotency_key="k", idempotency_scope="until_ack")) == []
    rig.replay_dead([a])
    assert rig.pop() == [a]
    rig.ack(a)
    assert len(rig.enqueue(Outgoing(b"x", idempotency_key="k"))) == 1
    rig.everywhere()


def test_purge_removes_ready_and_delayed_not_leased_nor_dead() -> None:
    rig = Rig()
    leased, dead = rig.enqueue(Outgoing(b"", priority=0), Outgoing(b"", priority=1))
    rig.pop(2)
    rig.bury(dead)
    waiting = rig.enqueue(Outgoing(b""), Outgoing(b"", delay=1), Outgoing(b"", deliver_at=from_ms(START + DAY), ttl=1))
    assert rig.purge() == 3
    assert {rig.state_of(id) for id in waiting} == {"purged"}
    assert (rig.state_of(leased), rig.state_of(dead)) == ("leased", "dead")
    rig.advance(DAY)
    rig.tick()
    rig.everywhere()
    assert rig.purge() == 1


def test_order_holds_over_all_of_int64() -> None:
    priorities = [5, -(1 << 63), (1 << 63) - 1, 0, -1, 5]
    for mode in ("min", "max"):
        rig = Rig(mode=mode)
        ids = rig.enqueue(*(Outgoing(b"", priority=p) for p in priorities))
        expected = sorted(range(6), key=lambda i: (priorities[i] if mode == "min" else -priorities[i], i))
        assert rig.pop(9) == [ids[i] for i in expected]


def test_aging_keeps_its_clock_when_a_message_is_rescheduled_or_replayed() -> None:
    """A message becomes more urgent from its enqueue on, whatever is done to it afterwards."""
    rig = Rig(ordering=Aging(AGING_RATE), max_retries_default=0)
    old, dead = rig.enqueue(Outgoing(b"", priority=9), Outgoing(b"", priority=8))
    rig.pop()
    rig.nack(dead)
    rig.advance(2 * SECOND)
    rig.enqueue(Outgoing(b"", priority=7))
    rig.reschedule(old, priority=8)
    rig.replay_dead([dead])
    assert rig.pop(2) == [old, dead]
    rig.everywhere()


def test_wall_clock_set_back_delays_only_messages_due_by_wall_time() -> None:
    rig = Rig()
    at, later = rig.enqueue(Outgoing(b"", deliver_at=from_ms(START + SECOND)), Outgoing(b"", delay=1))
    rig.advance(2 * SECOND)
    rig.set_wall(START - DAY)
    rig.tick()
    assert (rig.state_of(at), rig.state_of(later)) == ("delayed", "ready")
    rig.set_wall(START + SECOND - 1)
    assert rig.tick() == []
    rig.set_wall(START + SECOND)
    rig.tick()
    assert rig.state_of(at) == "ready"
    rig.everywhere()


def test_topic_without_streams_records_only_how_many_fired() -> None:
    rig = Rig(streams=False)
    rig.enqueue(*(Outgoing(b"", delay=1) for _ in range(5)))
    rig.advance(DAY)
    events = rig.tick(limit=3)
    assert [e.count for e in events if isinstance(e, Fired)] == [3, 2]
    rig.everywhere()


def test_enqueued_identities_are_known_after_a_restart() -> None:
    rig = Rig()
    rig.open_producer("p")
    rig.enqueue(Outgoing(b"x", seq=1), Outgoing(b"y", seq=2, idempotency_key="k"), producer="p")
    rig.take_snapshot()
    for topic in (rig.topic, rig.replayed(), rig.thawed()):
        rig.restart(topic)
        p = rig.p
        prints = np.array([1, 1, 2], dtype=np.uint32)
        assert p.state.sequences.check("p", 1, column(1, 2, 3), prints).status.tolist() == [DUPLICATE, DUPLICATE, NEW]
        assert p.state.sequences.check("p", 1, column(1, 2, 3), prints + 1).status.tolist() == [CONFLICT, CONFLICT, NEW]
        assert p.state.keys.check([key_hash("k")], prints[:1], START).status.tolist() == [DUPLICATE]
