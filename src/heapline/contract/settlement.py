"""Acting on leases that a program holds: of any topics, one command per topic, and one error for what was lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from heapline.contract import leases
from heapline.contract.columns import pack, unpack
from heapline.contract.errors import BadRequest, HeaplineError, LeaseLost
from heapline.contract.ids import shown_ids
from heapline.contract.leased_batch import LeasedColumns
from heapline.contract.message import LeaseRef, Message

Held = Message | LeaseRef | LeasedColumns[Any] | Iterable[Message | LeaseRef]


class Share(NamedTuple):
    """The leases of one topic that a call acts on."""

    topic: str
    keys: leases.LeaseKeys
    id_suffix: int  # the topic's, or 0 if it is not known


Answers = list[tuple[Share, Any]]


async def settle(broker: Any, held: Held, kind: Any, *options: Any, is_raised: bool = True) -> Answers:
    """Act on leases of any topics, one command per topic, on all that can be; then raise for those that could not."""
    answers: Answers = []
    for share in by_topic(held):
        try:
            answer = await broker.do(kind(share.topic, share.keys, *options))
        except HeaplineError as error:
            answer = error
        answers.append((share, answer))
    if is_raised:
        raise_worst(answers)
    return answers


def set_deadlines(held: list[Message | LeaseRef], extended: Answers) -> None:
    deadlines = {
        (share.topic, id, token): ms
        for share, answer in extended
        for id, token, ms in zip(
            unpack(share.keys.ids), unpack(share.keys.tokens), unpack(answer.deadline_ms), strict=True
        )
    }
    for m in held:
        if isinstance(m, Message) and deadlines.get((m.topic, m.id, m.token), -1) >= 0:
            m._deadline_ms = deadlines[m.topic, m.id, m.token]


def raise_worst(answers: Answers) -> None:
    """Raise the first error that is not a lost lease, otherwise one LeaseLost for all that were lost."""
    for _, answer in answers:
        if isinstance(answer, HeaplineError) and not isinstance(answer, LeaseLost):
            raise answer
    lost = [(share, answer.lost) for share, answer in answers if answer.lost]
    if lost:
        shown = [id for share, ids in lost for id in shown_ids(ids, share.id_suffix)]
        topics = ", ".join(share.topic for share, _ in lost)
        raise LeaseLost.showing([id for _, ids in lost for id in ids], topics, shown)


def listed(held: Held) -> list[Message | LeaseRef]:
    """Return messages or leases as a list; anything that was not popped raises BadRequest."""
    if isinstance(held, Message | LeaseRef):
        return [held]
    if not isinstance(held, Iterable):
        raise BadRequest(f"give messages that pop returned, got {held!r}")
    found = list(held)
    for kind in set(map(type, found)):
        if not issubclass(kind, Message | LeaseRef):
            raise BadRequest(f"give messages that pop returned, got {kind.__name__}")
        if issubclass(kind, LeaseRef):
            for m in found:
                if isinstance(m, LeaseRef) and not (_is_id(m.id) and _is_id(m.token)):
                    raise BadRequest(f"id and token of a LeaseRef must be integers from 0 to 2^63-1, got {m!r}")
    return found


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def by_topic(held: Held) -> list[Share]:
    """Return the leases of each topic."""
    if isinstance(held, LeasedColumns):
        return [Share(held.topic, held.leases, held.id_suffix)] if held else []
    found = listed(held)
    names = dict.fromkeys([m.topic for m in found])
    return [_share(name, found if len(names) == 1 else [m for m in found if m.topic == name]) for name in names]


def _share(topic: str, held: list[Message | LeaseRef]) -> Share:
    keys = leases.LeaseKeys(pack([m.id for m in held]), pack([m.token for m in held]))
    return Share(topic, keys, getattr(held[0], "id_suffix", 0))
