"""The storage of messages: rings of slots, and the SQL that moves rows between them.

`ready`, `lease` and `ended` are rings of tables, the slots. New rows go to a ring's open slot; all slots are read.

*ready.* The open slot is the ring's turn modulo the number of slots. A transaction that inserts takes the rings' lock
in shared mode before it reads the turn, and turning the ring takes that lock alone (rings.py). So nothing is ever
inserted into a closed slot, and a node may remember that a closed slot has nothing before a certain place (`Floors`).
Without that, each pop would step over all rows that earlier pops have deleted, for as long as an old transaction keeps
them.

*cold.* When few slots are empty because the closed ones have many messages left, these are moved to slots of a second
ring, which belong to `ready` too, in small steps (rings.py). Its open slot has its own turn. A slot of this ring is
closed when it is large, so a backlog of any size leaves most slots of the first ring to new messages.

Pops look only into slots that may have rows (`ready_live`). That is known when a slot is opened, because no other
transaction runs then, and holds until the next is opened: all other slots only lose rows.

*lease.* A lease's token is random, and contains its slot (token % LEASE_SLOTS), so settling touches one table. When few
slots are empty, the leases that the oldest one still has move to one more table, LONG_LEASES (rings.py). So a lease
that is not in its slot is looked for there (`in_slots`).

*ended* and *acked.* The open slot follows from the time: each takes ENDED_MS, and the one after it is truncated
meanwhile.

*delayed.* A slot holds the messages of one period of time (delayed.py).

*counts.* How many messages each topic has, as differences that are summed (migrations/). The statements read its turn
themselves, because a row may go to any slot. So it is with *sequences* of producers (dedup.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

from heapline.contract.fields import INT64_MIN
from heapline.sql.statements import statement

READY_SLOTS, COLD_SLOTS, LEASE_SLOTS, ENDED_SLOTS, DELAYED_SLOTS, COUNTS_SLOTS = 16, 8, 8, 4, 36, 4
SEQUENCES_SLOTS = 4
LONG_LEASES = LEASE_SLOTS  # the slot of leases that outlasted the others of theirs
POP_SLOTS = READY_SLOTS + COLD_SLOTS  # that pops look into: the cold ones are numbered after the others
SLOTS = {
    "ready": READY_SLOTS,
    "cold": COLD_SLOTS,
    "lease": LEASE_SLOTS,
    "ended": ENDED_SLOTS,
    "delayed": DELAYED_SLOTS,
    "acked": ENDED_SLOTS,
    "counts": COUNTS_SLOTS,
    "sequences": SEQUENCES_SLOTS,
}
ALL_READY = (1 << POP_SLOTS) - 1
ENDED_MS = 300_000  # that a slot of `ended` is open; removed messages are remembered for two to three times as long
FLOORS_MAX = 10_000  # topics
COLUMNS = (
    "topic, id, key, due, priority, attempts, ttl, expires, max_retries, reason, name, headers, scope, hash, payload"
)


def slot_of(token: int) -> int:
    """Return the slot of a lease."""
    return token % LEASE_SLOTS


def by_slot(ids: Iterable[int], tokens: Iterable[int]) -> dict[int, tuple[list[int], list[int]]]:
    """Return ids and tokens by slot."""
    ids, tokens = list(ids), list(tokens)
    slots = {slot_of(token) for token in set(tokens)}
    if len(slots) == 1:  # as after one pop
        return {slots.pop(): (ids, tokens)}
    found: dict[int, tuple[list[int], list[int]]] = {}
    for id, token in zip(ids, tokens, strict=True):
        share = found.setdefault(slot_of(token), ([], []))
        share[0].append(id)
        share[1].append(token)
    return found


async def in_slots(
    ids: Iterable[int], tokens: Iterable[int], work: Callable[[int, list[int], list[int]], Awaitable[Collection[int]]]
) -> None:
    """Do `work` on leases, given slot, ids and tokens; it returns the ids that it found there.

    Those that are not in the slot of their token are looked for among the long leases, by a later statement: a lease
    that moves meanwhile is in one of the two.
    """
    left: tuple[list[int], list[int]] = ([], [])
    for slot, (some, their_tokens) in by_slot(ids, tokens).items():
        found = await work(slot, some, their_tokens)
        if len(found) < len(some):
            for id, token in zip(some, their_tokens, strict=True):
                if id not in found:
                    left[0].append(id)
                    left[1].append(token)
    if left[0]:
        await work(LONG_LEASES, *left)


class Place(NamedTuple):
    """A place in the order of a topic's messages."""

    key: int
    due: int
    id: int


START = Place(INT64_MIN, INT64_MIN, -1)


class Turns(NamedTuple):
    """The number of times that the rings with ready messages have turned."""

    ready: int
    cold: int

    def opened_at(self, slot: int) -> int:
        """Return the last turn of its ring at which a slot may have been opened."""
        if slot < READY_SLOTS:
            return self.ready - (self.ready - slot) % READY_SLOTS
        return self.cold - (self.cold - (slot - READY_SLOTS)) % COLD_SLOTS

    def is_open(self, slot: int) -> bool:
        return self.opened_at(slot) == (self.ready if slot < READY_SLOTS else self.cold)


class Floors:
    """For each topic and closed slot of `ready`, a place up to which the slot has no messages of the topic.

    Raised by what a committed claim took: everything better, wherever it was, has been taken too. Forgotten when a slot
    is opened again, and when a connection is lost or opened: a failover may bring rows back.
    """

    def __init__(self) -> None:
        self._by_topic: dict[int, dict[int, tuple[int, Place]]] = {}  # topic -> slot -> (when it was opened, place)
        self.epoch = 0  # how often they were forgotten

    def of(self, topic: int, turns: Turns) -> list[Place]:
        """Return the place of each slot."""
        known = self._by_topic.get(topic, {})
        places = []
        for slot in range(POP_SLOTS):
            opened, place = known.get(slot, (-1, START))
            places.append(place if opened == turns.opened_at(slot) else START)
        return places

    def raise_to(self, topic: int, turns: Turns, place: Place, epoch: int) -> None:
        """Record that a committed claim took all messages up to `place`, unless the floors were forgotten since."""
        if epoch != self.epoch:
            return
        if len(self._by_topic) > FLOORS_MAX:
            self._by_topic.clear()
        floors, before = self._by_topic.setdefault(topic, {}), self.of(topic, turns)
        for slot in range(POP_SLOTS):
            if not turns.is_open(slot):
                floors[slot] = (turns.opened_at(slot), max(before[slot], place))

    def clear(self) -> None:
        self._by_topic.clear()
        self.epoch += 1


class Layout(NamedTuple):
    """The rings as a transaction found them, and the SQL for that."""

    now: int  # ms, by the database's clock
    ready_turn: int
    lease_turn: int
    ready_live: int = ALL_READY  # slots of `ready` that may have rows, as bits
    cold_turn: int = 0

    @property
    def turns(self) -> Turns:
        return Turns(self.ready_turn, self.cold_turn)

    def turn(self, ring: str) -> int:
        return {"ready": self.ready_turn, "cold": self.cold_turn, "lease": self.lease_turn}[ring]

    def open(self, ring: str) -> int:
        """Return the open slot of `ready`, `cold` or `lease`, counted in its ring."""
        return self.turn(ring) % SLOTS[ring]

    @property
    def open_cold(self) -> int | None:
        """The slot of `ready` that takes what is moved out of closed ones. None: pops do not look into it yet."""
        slot = READY_SLOTS + self.open("cold")
        return slot if self.ready_live >> slot & 1 else None

    @property
    def open_ended(self) -> int:
        """The open slot of `ended`."""
        return self.now // ENDED_MS % ENDED_SLOTS

    @property
    def next_ended(self) -> int:
        """The slot of `ended` that is opened next. What it has is two to three periods old."""
        return (self.open_ended + 1) % ENDED_SLOTS

    def to_ready(self, name: str, **tables: str) -> str:
        """Return a statement that inserts into `ready`."""
        slot = str(self.open("ready"))
        return statement(name, ready=f"ready_{slot}", slot=slot, columns=COLUMNS, **tables)

    def to_ended(self, name: str, **tables: str) -> str:
        """Return a statement that inserts into `ended`."""
        slot = str(self.open_ended)
        return statement(name, ended=f"ended_{slot}", slot=slot, **tables)

    @property
    def _live(self) -> int:
        return self.ready_live | 1 << self.open("ready")

    def insert(self, name: str) -> str:
        """Return a statement that stores new messages, and returns those of their ids that other messages have."""
        taken = _taken(self._live, "$2")
        if name == "insert_ready":
            return self.to_ready(name, taken=taken)
        return of_columns(name, taken=taken)

    def taken(self) -> str:
        """Return the statement that finds ids which ready or leased messages have."""
        return _taken(self._live, "$1")

    def claim(self) -> str:
        """Return the statement that leases the best ready messages of a topic."""
        return _claim(self._live)

    def take(self) -> str:
        """Return the statement that leases certain messages of a topic, if they are among the best ones."""
        return _take(self._live)

    def best(self) -> str:
        """Return the statement that reads the places of the best ready messages of a topic."""
        return statement("best", candidates=_union("best_candidates", self._live))


def ack_in(slot: int) -> str:
    """Return the statement that acks leases of one slot. It finds the open slot of `acked` itself."""
    return statement("ack", lease=f"lease_{slot}", period=str(ENDED_MS), slots=str(ENDED_SLOTS))


def of_columns(name: str, **tables: str) -> str:
    """Return a statement that lists all columns of a message."""
    return statement(name, columns=COLUMNS, **tables)


def _slots(live: int) -> list[str]:
    return [str(slot) for slot in range(POP_SLOTS) if live >> slot & 1]


def _union(name: str, live: int) -> str:
    """Return a query on each of these slots of `ready`, as one."""
    return "\nUNION ALL\n".join(statement(name, slot=s, ready=f"ready_{s}") for s in _slots(live))


@lru_cache(256)
def _taken(live: int, ids: str) -> str:
    tables = ["lease", *(f"ready_{slot}" for slot in _slots(live))]
    return "\nUNION ALL ".join(statement("taken", table=table, ids=ids) for table in tables)


@lru_cache(256)
def _claim(live: int) -> str:
    return _lease_from(live, _union("claim_candidates", live), "")


@lru_cache(256)
def _take(live: int) -> str:
    allowed = statement("take_allowed", better=_union("take_better", live))
    return _lease_from(live, _union("take_candidates", live), allowed)


def _lease_from(live: int, candidates: str, allowed: str) -> str:
    slots = _slots(live)
    return statement(
        "claim",
        allowed=allowed,
        candidates=candidates,
        deletes=",\n".join(statement("claim_delete", slot=s, ready=f"ready_{s}") for s in slots),
        taken=" UNION ALL ".join(f"SELECT {COLUMNS} FROM from_{s}" for s in slots),
        slots=str(LEASE_SLOTS),
        columns=COLUMNS,
    )
