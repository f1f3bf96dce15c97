"""The naive partition: a dict of messages and sorted lists, simple enough to be checked by reading.

It defines the terms (which message is next, whether a token is valid, when something ends) and checks each event
caused by time against them. It has no heaps, wheels, positions or stale entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from heapline.contract.config import Aging, TopicConfig
from heapline.contract.ids import EPOCH_2024_MS
from heapline.core.lifecycle import GONE
from heapline.core.now import Now

LIVING = ("ready", "delayed", "leased", "dead")
#: Aging at this rate moves a key by exactly one unit of 1/1024 per millisecond, so the model needs no rounding.
AGING_RATE = 1000 / 1024
AGED_PRIORITY_MAX = (1 << 52) - 1
WINDOW, PENDING, UNTIL_ACK = range(3)


@dataclass
class NaiveLease:
    token: int
    deadline: int
    started: int
    holder: str | None


@dataclass
class NaiveMessage:
    id: int
    priority: int
    enqueued_at: int
    state: str = "ready"
    due: int = 0  # while delayed
    wall: bool = False  # due is wall time
    ttl_ms: int = 0
    expires: int = 0  # 0 = none
    expires_wall: bool = False
    max_retries: int | None = None
    attempts: int = 0  # deliveries so far that count
    lease: NaiveLease | None = None
    was_leased: bool = False
    lapsed: bool = False  # its time to live ended while it was leased
    fairness: str | None = None
    turn: int = 0  # on a topic where fairness keys take turns
    retries: bool = False  # it waits for a retry
    reason: str | None = None
    ended_at: int = 0
    end_reason: str | None = None

    @property
    def is_living(self) -> bool:
        return self.state in LIVING

    @property
    def is_waiting(self) -> bool:
        return self.state in ("ready", "delayed")


@dataclass
class NaiveKey:
    id: int
    print: int
    scope: int
    expires: int


@dataclass
class NaiveProducer:
    epoch: int
    answered_below: int = 0
    seqs: dict[int, tuple[int, int]] = field(default_factory=dict)  # seq -> id, fingerprint
    written_at: list[int] = field(default_factory=list)


class NaiveTurns:
    """Return a key's next turn at a priority: one after its last, or after the last that was served there."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.last: dict[tuple[int, str | None], int] = {}

    def take(self, priority: int, key: str | None) -> int:
        turn = max(self.now.get(priority, 0), self.last.get((priority, key), 0)) + 1
        self.last[priority, key] = turn
        return turn

    def forget(self, key: str | None) -> None:
        self.last = {at: turn for at, turn in self.last.items() if at[1] != key}

    def served(self, priority: int, turn: int) -> None:
        self.now[priority] = max(self.now.get(priority, 0), turn)


class NaivePartition:
    def __init__(self, config: TopicConfig) -> None:
        self.config = config
        self.messages: dict[int, NaiveMessage] = {}
        self.acked: set[tuple[int, int]] = set()
        self.keys: dict[str, NaiveKey] = {}
        self.producers: dict[str, NaiveProducer] = {}
        self.turns = NaiveTurns()

    # -- queries -------------------------------------------------------------------------------------------------------

    def place_in_line(self, m: NaiveMessage) -> tuple[int, ...]:
        """Smallest first. Python's ints do not overflow, so MAX is plain negation here."""
        sign = 1 if self.config.mode == "min" else -1
        if self.config.fairness == "keys":
            return sign * m.priority, m.turn, m.id
        if not isinstance(self.config.ordering, Aging):
            return sign * m.priority, m.id
        assert self.config.ordering.rate == AGING_RATE
        priority = max(-AGED_PRIORITY_MAX, min(AGED_PRIORITY_MAX, m.priority))
        return sign * priority * 1024 + (m.enqueued_at - EPOCH_2024_MS), m.id

    def inside(self, *states: str) -> list[NaiveMessage]:
        return [m for m in self.messages.values() if m.state in states]

    def count(self, state: str) -> int:
        return len(self.inside(state))

    def line(self) -> list[NaiveMessage]:
        """Return all ready messages whose fairness key has a free slot, best first."""
        line = sorted(self.inside("ready"), key=self.place_in_line)
        limit = self.config.max_inflight_per_key
        if not limit:
            return line
        out = Counter(m.fairness for m in self.inside("leased"))
        allowed: list[NaiveMessage] = []
        for m in line:
            if m.fairness is None or out[m.fairness] < limit:
                allowed.append(m)
                out[m.fairness] += 1
        return allowed

    def timers(self, wall: bool) -> list[NaiveMessage]:
        return sorted((m for m in self.inside("delayed") if m.wall == wall), key=lambda m: (m.due, m.id))

    def held(self, id: int, token: int) -> bool:
        lease = self.messages[id].lease if id in self.messages else None
        return lease is not None and lease.token == token

    def split(self, ids: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return (ids that are held, each once; ids that are not)."""
        pairs = list(zip(ids, tokens, strict=True))
        held = list(dict.fromkeys(id for id, token in pairs if self.held(id, token)))
        return held, [id for id, token in pairs if not self.held(id, token)]

    def changes_in(self, now: Now) -> list[int]:
        """Return the milliseconds until each event that time alone causes; those already due are 0 or less."""
        waits = [m.lease.deadline - now.steady for m in self.messages.values() if m.lease is not None]
        waits += [m.due - clock(now, m.wall) for m in self.inside("delayed")]
        for m in self.inside("ready", "delayed", "leased"):
            if m.expires and not m.lapsed:
                waits.append(m.expires - clock(now, m.expires_wall))
        return waits

    # -- commands --------------------------------------------------------------------------------------------------

    def become_ready(self, m: NaiveMessage) -> None:
        """Make it ready with the next turn of its fairness key."""
        if self.config.fairness == "keys":
            m.turn = self.turns.take(m.priority, m.fairness)

    def enqueue(self, m: NaiveMessage) -> None:
        assert m.id not in self.messages
        reported = m.turn
        if not m.due:
            self.become_ready(m)
        assert reported in (0, m.turn), "its turn is not the next one of its key"
        m.state = "delayed" if m.due else "ready"
        if m.ttl_ms:
            m.expires, m.expires_wall = (m.due or m.enqueued_at) + m.ttl_ms, bool(m.due) and m.wall
        self.messages[m.id] = m

    def lease(self, id: int, lease: NaiveLease) -> None:
        m = self.messages[id]
        assert m.state == "ready", "only ready messages are delivered"
        assert m.lease is None, "a message has one lease at most"
        m.state, m.lease, m.was_leased = "leased", lease, True
        m.attempts += 1
        self.turns.served(m.priority, m.turn)
        limit = self.config.max_inflight_per_key
        if limit and m.fairness is not None:
            assert sum(o.fairness == m.fairness for o in self.inside("leased")) <= limit, "too many leases of a key"
        assert m.attempts <= self.deliveries_max(m), "a message was delivered more often than allowed"

    def deliveries_max(self, m: NaiveMessage) -> int:
        # The default may be lowered while messages are leased, so the bound for those is what any default allows.
        return 251 if m.max_retries is None else m.max_retries + 1

    def ack(self, ids: Sequence[int], tokens: Sequence[int], now: Now) -> tuple[list[int], list[int]]:
        """Return (ids that were acked; ids with an invalid token). A recent ack with the same token succeeds again."""
        lost = [
            id
            for id, token in zip(ids, tokens, strict=True)
            if not self.held(id, token) and (id, token) not in self.acked
        ]
        held, _ = self.split(ids, tokens)
        for id in held:
            m = self.messages[id]
            assert m.lease is not None
            self.acked.add((id, m.lease.token))
            self.end(id, "acked", now.steady)
        return held, lost

    def fate(self, id: int) -> str:
        """Decide what a leased message becomes when it returns unprocessed."""
        m = self.messages[id]
        limit = self.config.max_retries_default if m.max_retries is None else m.max_retries
        if m.lapsed:
            return "expired"
        if m.attempts > limit:
            return "dead" if self.config.dlq else "dropped"
        return "waits"

    def retry_due(self, id: int, now: Now, backoff_ms: int | None) -> int:
        """Return when it is ready again, 0 = immediately. The tests' jitter is always in the middle."""
        backoff, attempts = self.config.backoff, self.messages[id].attempts
        if backoff_ms is None:
            backoff_ms = round(min(backoff.max, backoff.base * backoff.factor ** (attempts - 1)) * 1000)
        return now.steady + backoff_ms if backoff_ms else 0

    def come_back(self, id: int, now: Now, backoff_ms: int | None, reason: str | None, end_reason: str) -> None:
        m, fate = self.messages[id], self.fate(id)
        if fate == "waits":
            m.due, m.wall = self.retry_due(id, now, backoff_ms), False
            m.state, m.lease = ("delayed" if m.due else "ready"), None
            m.retries = m.due != 0
            m.reason = reason if reason is not None else m.reason
        elif fate == "expired":
            self.end(id, "expired", now.steady)
        else:
            self.die(id, end_reason, now, keep=self.config.dlq)

    def die(self, id: int, reason: str, now: Now, keep: bool) -> None:
        if not keep:
            self.end(id, "dropped", now.steady, reason)
            return
        m = self.messages[id]
        m.state, m.lease, m.lapsed = "dead", None, False
        m.ended_at, m.end_reason = now.steady, reason

    def release(self, id: int, now: Now) -> None:
        m = self.messages[id]
        if m.lapsed:
            self.end(id, "expired", now.steady)
        else:
            m.state, m.lease = "ready", None
            m.attempts -= 1

    def extend(self, id: int, now: Now, extend_ms: int) -> None:
        lease = self.messages[id].lease
        assert lease is not None
        latest = lease.started + round(self.config.lease_max * 1000)
        lease.deadline = max(lease.deadline, min(now.steady + extend_ms, latest))

    def end(self, id: int, how: str, at: int, reason: str | None = None) -> None:
        assert how in GONE
        m = self.messages[id]
        m.state, m.lease, m.lapsed = how, None, False
        m.ended_at, m.end_reason = at, reason

    def reschedule(self, id: int, now: Now, *, priority: int | None, due: int | None, wall: bool) -> None:
        """Omitted values stay. A past time means now; the time to live counts from the due time."""
        m = self.messages[id]
        assert m.is_waiting
        before = m.priority, m.state
        m.priority = m.priority if priority is None else priority
        if due is not None:
            self._give_due(m, now, due, wall)
        m.retries = False
        if m.state == "delayed":
            m.turn = 0
        elif before != (m.priority, "ready"):
            self.become_ready(m)

    def _give_due(self, m: NaiveMessage, now: Now, due: int, wall: bool) -> None:
        due = max(due, clock(now, wall))
        if m.ttl_ms:
            m.expires, m.expires_wall = due + m.ttl_ms, wall
        later = due > clock(now, wall)
        m.state, m.due, m.wall = ("delayed", due, wall) if later else ("ready", 0, False)

    def replay(self, id: int, now: Now, due: int, restart_ttl: bool) -> None:
        m = self.messages[id]
        assert m.state == "dead"
        m.state, m.due, m.wall = ("delayed", due, False) if due else ("ready", 0, False)
        m.attempts, m.reason = 0, None
        if not due:
            self.become_ready(m)
        m.expires, m.expires_wall = ((due or now.steady) + m.ttl_ms if m.ttl_ms and restart_ttl else 0), False

    # -- events caused by time -----------------------------------------------------------------------------------------

    def fire(self, ids: Sequence[int], wall: bool, now: Now) -> None:
        first = self.timers(wall)[: len(ids)]
        assert [m.id for m in first] == list(ids), "timers fire in the order in which they are due"
        for m in first:
            assert m.due <= clock(now, wall), "a timer fired early"
            m.state, m.due, m.wall = "ready", 0, False
            if not m.retries:
                self.become_ready(m)
            m.retries = False

    def time_out(self, id: int, now: Now, becomes: str) -> None:
        m = self.messages[id]
        assert m.lease is not None, "a lease ended that does not exist"
        assert m.lease.deadline <= now.steady, "a lease ended early"
        assert self.fate(id) == becomes
        self.come_back(id, now, None, "lease expired", "lease expired")

    def expire(self, id: int, stood: str, now: Now) -> None:
        m = self.messages[id]
        assert m.state == stood, "it stood elsewhere"
        self._check_expiry(m, now)
        self.end(id, "expired", now.steady)

    def lapse(self, id: int, now: Now) -> None:
        m = self.messages[id]
        assert m.state == "leased"
        if not m.lapsed:
            self._check_expiry(m, now)
        m.lapsed = True

    @staticmethod
    def _check_expiry(m: NaiveMessage, now: Now) -> None:
        assert m.expires, "it expired without a time to live"
        assert m.expires <= clock(now, m.expires_wall), "it expired early"

    # -- dedup -----------------------------------------------------------------------------------------------------

    def known_key(self, name: str, now: Now) -> NaiveKey | None:
        key = self.keys.get(name)
        if key is None:
            return None
        m = self.messages[key.id]
        known = {
            WINDOW: key.expires > now.steady,
            PENDING: m.is_living and not m.was_leased,
            UNTIL_ACK: m.is_living,
        }[key.scope]
        return key if known else None


def clock(now: Now, wall: bool) -> int:
    return now.wall if wall else now.steady


def ids_of(messages: Iterable[NaiveMessage]) -> list[int]:
    return [m.id for m in messages]
