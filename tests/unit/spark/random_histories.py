"""Random histories of messages in an in-memory engine, with all kinds of events."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from heapline.contract.config import Aging, Backoff
from heapline.contract.errors import ConflictError, RequestError
from heapline.contract.message import DlqFilter, Outgoing
from heapline.spark.audit.facts import Balance
from tests.unit.engine.rig import Rig, settle
from tests.unit.spark.log_rig import table

#: Settings of topics under which the same life leads to other events.
TOPICS: dict[str, dict[str, Any]] = {
    "plain": {},
    "parted": {"partitions": 3},
    "largest first": {"partitions": 2, "mode": "max", "max_retries_default": 1},
    "without streams": {"streams": False, "dlq": False, "max_retries_default": 1},
    "aging": {"partitions": 2, "ordering": Aging(3.0)},
    "in turn": {"partitions": 2, "fairness": "keys"},
}


async def live(rig: Rig, random: Random, steps: int = 40, topic: str = "jobs") -> None:
    """Lead a life of so many steps."""
    held: list[Any] = []
    known: list[int] = []
    for number in range(steps):
        await _step(rig, random, topic, held, known, number)
    await settle()


async def _step(rig: Rig, random: Random, topic: str, held: list[Any], known: list[int], number: int) -> None:
    hl = rig.hl
    act = random.choice(
        ["send"] * 4 + ["pop"] * 5 + ["ack"] * 3 + ["nack", "nack", "release", "extend", "bury", "cancel", "reschedule",
         "wait", "wait", "batch", "abort", "replay", "delete", "throttle"] + ["purge", "settings"] * (number % 13 == 3)
    )  # fmt: skip
    some = [held.pop(random.randrange(len(held))) for _ in range(min(len(held), random.randint(1, 3)))]
    if act == "send":
        known += [sent.id for sent in await hl.enqueue_batch(topic, messages(rig, random, random.randint(1, 6)))]
    elif act == "pop":
        held += await hl.pop(topic, random.randint(1, 4), holder=random.choice([None, "ann"]), visibility=20)
    elif act == "wait":
        rig.clock.advance(random.choice([0.5, 3.0, 25.0]))
        await settle()
        held.clear()  # by then some of them have run out, and which is not of interest
    elif act in ("batch", "abort"):
        await _batch(rig, random, topic, f"b{number}", commit=act == "batch")
    elif act in ("cancel", "reschedule") and known:
        id = random.choice(known)
        with suppress(RequestError, ConflictError):  # it may be removed, or leased
            if act == "cancel":
                await hl.cancel(topic, id)
            else:
                await hl.reschedule(topic, id, priority=random.randint(0, 9), delay=random.choice([None, 0, 4.0]))
    elif act == "replay":
        await hl.dlq_replay(topic, rate=random.choice([None, 1.0]))
    elif act == "delete":
        await hl.dlq_delete(topic, where=DlqFilter(reason="bad"))
    elif act == "throttle":
        await hl.set_partition_throttled(topic, 0, random.random() < 0.3, "slow")
    elif act == "settings":
        await hl.update_topic(topic, lease_max=float(random.randint(100, 200)))
    elif act == "purge":
        await hl.purge(topic)
    elif some:
        await _settle_some(hl, act, some)
        return
    held += some


async def _settle_some(hl: Any, act: str, some: list[Any]) -> None:
    acts = {
        "ack": lambda: hl.ack(some), "release": lambda: hl.release(some), "extend": lambda: hl.extend(some, 60),
        "nack": lambda: hl.nack(some, reason="no luck"), "bury": lambda: hl.bury(some, reason="bad"),
    }  # fmt: skip
    with suppress(ConflictError):  # the lease may have ended
        if act in acts:
            await acts[act]()


def messages(rig: Rig, random: Random, count: int) -> list[Outgoing]:
    return [
        Outgoing(
            b"x" * random.randint(0, 9), random.randint(0, 9), key=f"k{random.randint(0, 5)}",
            delay=random.choice([None, None, 2.0, 30.0]), ttl=random.choice([None, None, None, 5.0]),
            max_retries=random.choice([None, None, 0]),
        ) if random.random() < 0.9 else Outgoing(b"at", 5, deliver_at=moment(rig) + timedelta(seconds=7))
        for _ in range(count)
    ]  # fmt: skip


def moment(rig: Rig) -> datetime:
    return datetime.fromtimestamp(rig.clock.wall_ms() / 1000, UTC)


async def _batch(rig: Rig, random: Random, topic: str, name: str, commit: bool) -> None:
    for part in ("p", "q"):
        await rig.hl.prepare_batch(name, part, messages(rig, random, random.randint(1, 5)), topic=topic)
    if commit:
        await rig.hl.commit_batch(name, random.choice([["p"], ["q"], ["p", "q"]]))
    else:
        await rig.hl.abort_batch(name)


async def events(rig: Rig, topic: str = "jobs") -> Any:
    return table(rig, view="events", subscribe=topic)


async def standing(rig: Rig, topic: str = "jobs") -> dict[int, Balance]:
    stats = await rig.hl.stats(topic)
    return {p.partition: Balance(p.offset, p.ready + p.delayed, p.leased, p.dead) for p in stats.partitions}


async def config(rig: Rig, topic: str = "jobs") -> Any:
    (info,) = [info for info in await rig.hl.list_topics() if info.name == topic]
    return info.config


BACKOFF = {"backoff": Backoff(base=1.0, jitter=0.0)}
