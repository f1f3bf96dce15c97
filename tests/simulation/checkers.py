"""Checkers, named for the promises that they check in a history. Each yields complaints as text; none means kept.

They use only what clients saw (history.py), so they apply to any broker. If an outcome is unknown, every possibility
is allowed: a checker complains only when no possibility explains what was seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tests.simulation.batch_checker import prepared_complaints
from tests.simulation.evidence import DRAIN, Delivery, Evidence, Life, is_on
from tests.simulation.history import UNSURE, Call, History, name_in
from tests.simulation.limit_checker import KeyLimit
from tests.simulation.order_checker import StrictOrder

SLACK_MS = 2  # two clocks are read at two times, in whole milliseconds


class Checker(Protocol):
    def complaints(self, seen: Evidence) -> Iterator[str]: ...


class NoLostMessage:
    """A message whose enqueue was answered exists at the end, unless a call may have removed it."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        if seen.topic not in seen.history.drained:
            return
        for name, answers in seen.reported.items():
            first = min(seen.sends[name], key=lambda call: call.started)
            for received, call in answers:
                if not received.error and not self._accounted_for(seen, received.id, first):
                    yield f"{name} ({received.id}) was enqueued (call {call.number}) and is nowhere at the end"

    def _accounted_for(self, seen: Evidence, id: int, call: Call) -> bool:
        life = seen.life(id)
        if any(d.call.client == DRAIN for d in life.deliveries) or any(c.client == DRAIN for _, c in seen.listed[id]):
            return True
        if any(c.client != DRAIN for c in life.acks) or life.ends:
            return True
        if any(purge.ended > call.started for purge in seen.purges):
            return True
        return any(seen.history.sent[name].ttl is not None for name in life.names)


class RefusedChangesNothing:
    """A message is only seen if an enqueue of it was answered, or may have been executed."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        for life in seen.lives.values():
            for name in sorted({d.got.name for d in life.deliveries}):
                if not any(self._may_have_brought(call, name) for call in seen.sends[name]):
                    yield f"{name} ({life.id}) was delivered, though every enqueue of it was refused"

    def _may_have_brought(self, call: Call, name: str) -> bool:
        if call.outcome != "ok" or call.verb == "prepare_batch":
            return call.may_have_happened
        names = [message.name for message in call.args["messages"]]
        return call.result[names.index(name)].error in ("", *(kind.__name__ for kind in UNSURE))


class PayloadIntact:
    """Delivered bytes equal the enqueued bytes."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        for life in seen.lives.values():
            for got, call in life.deliveries:
                sent = seen.history.sent.get(got.name)
                if sent is None or sent.payload != got.payload:
                    yield f"call {call.number} delivered {len(got.payload)} bytes ({life.id}) that no client sent"
                elif sent.priority != got.priority and not life.moves:
                    yield f"{got.name} was sent with priority {sent.priority} and delivered with {got.priority}"


class SingleLease:
    """Until a lease has ended, no other worker gets the message."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        for call in seen.history.of(seen.topic, "pop"):
            ids = [got.id for got in call.result] if call.outcome == "ok" else []
            if len(ids) != len(set(ids)):
                yield f"call {call.number} returned a message twice"
        for life, first, second in seen.pairs():
            if first.got.token == second.got.token:
                yield f"calls {first.call.number} and {second.call.number} both got lease {first.got.token}"
            elif not self._had_ended(life, first, second):
                yield (
                    f"{life.id} was delivered to call {second.call.number} at {second.decided}, while call "
                    f"{first.call.number} held it until {self._held_until(life, first)}"
                )

    def _had_ended(self, life: Life, first: Delivery, second: Delivery) -> bool:
        if second.decided >= self._held_until(life, first):
            return True
        return any(is_on(c, first.got) and c.started < second.call.ended for c in life.returns)

    @staticmethod
    def _held_until(life: Life, held: Delivery) -> int:
        """Steady time. An answered extension counts: the next lease can only be later."""
        extended = [
            int(c.result["deadlines"].get(life.id, 0))
            for c in life.extends if c.outcome == "ok" and is_on(c, held.got) and "deadlines" in c.result
        ]  # fmt: skip
        return max([held.got.deadline_ms, *extended])


class AckedStaysGone:
    """A message that was acked, cancelled, deleted or purged, and answered so, is never seen again."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        for life in seen.lives.values():
            for ack in life.acks:
                if ack.outcome == "ok":
                    token = dict(ack.args["leases"])[life.id]
                    yield from self._later(seen, life, ack, lambda d, token=token: d.got.token > token)
            for end in life.ends:
                if end.outcome == "ok":
                    yield from self._later(seen, life, end, lambda d, end=end: d.call.started > end.ended)
            yield from self._purged(seen, life)

    def _later(self, seen: Evidence, life: Life, end: Call, is_later: object) -> Iterator[str]:
        for delivery in life.deliveries:
            if is_later(delivery):  # type: ignore[operator]
                yield f"{life.id} ended by {end.verb} (call {end.number}) came back in call {delivery.call.number}"
        for _, listed in seen.listed[life.id]:
            if listed.started > end.ended:
                yield f"{life.id} ended by {end.verb} (call {end.number}) is a dead letter in call {listed.number}"

    def _purged(self, seen: Evidence, life: Life) -> Iterator[str]:
        """Certainly waiting when a purge was called: enqueued before, first leased only afterwards."""
        if not life.deliveries or seen.listed[life.id]:
            return
        first = life.deliveries[0].call
        enqueued = [c.ended for name in life.names for received, c in seen.reported[name] if received.id == life.id]
        for purge in seen.purges:
            waited = bool(enqueued) and min(enqueued) < purge.started and first.started > purge.ended
            if purge.outcome == "ok" and waited and not self._out_unseen(seen, purge):
                yield f"{life.id} was waiting when call {purge.number} purged, and was delivered in call {first.number}"

    @staticmethod
    def _out_unseen(seen: Evidence, purge: Call) -> bool:
        """An unanswered pop may have leased it when the purge was called."""
        return any(pop.started < purge.ended for pop in seen.unsure_pops)


class NoDoubleEnqueue:
    """One message sent again under its identity is one message; and no message is ever duplicated."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        ids: dict[str, set[int]] = {}
        for life in seen.lives.values():
            for name in life.names:
                ids.setdefault(name, set()).add(life.id)
        for id, rows in seen.listed.items():
            for dead, _ in rows:
                if dead.payload is not None:
                    ids.setdefault(name_in(dead.payload), set()).add(id)
        for name, found in ids.items():
            sends = len(seen.sends[name])
            if len(found) > 1 and (sends == 1 or seen.history.sent[name].identified):
                yield f"{name} was sent {sends} times and is {len(found)} messages: {sorted(found)}"
        for name, answers in seen.reported.items():
            first = min(call.started for call in seen.sends[name])
            for received, call in answers:
                if received.duplicate and call.started == first:
                    yield f"call {call.number} called the first {name} a duplicate"


class BatchAllOrNothing:
    """All messages of an atomic batch exist, or none. Prepared batches are in batch_checker.py."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        if seen.topic not in seen.history.drained or seen.topic in seen.history.damaged:
            return
        visible = {name for life in seen.lives.values() for name in life.names}
        visible |= {name_in(d.payload) for rows in seen.listed.values() for d, _ in rows if d.payload is not None}
        for call in seen.history.of(seen.topic, "enqueue"):
            names = [message.name for message in call.args["messages"]]
            if not call.args["atomic"] or len(names) < 2 or not call.may_have_happened:
                continue
            if call.outcome == "ok" and any(received.error for received in call.result):
                yield f"call {call.number} refused some of an atomic batch and accepted others"
            there = [name for name in names if name in visible]
            if there and len(there) < len(names) and not self._may_be_short(seen, call):
                missing = sorted(set(names) - set(there))
                yield f"of the batch in call {call.number} {len(there)} exist, and not {missing[:5]}"

    @staticmethod
    def _may_be_short(seen: Evidence, call: Call) -> bool:
        messages = call.args["messages"]
        if any(message.ttl is not None for message in messages):
            return True
        # An earlier unanswered send may have enqueued the batch before this call.
        first = min(send.started for send in seen.sends[messages[0].name] if send.may_have_happened)
        return any(purge.ended > first for purge in seen.purges)


class NeverEarly:
    """Nothing is delivered before it is due: its delay, delivery time, backoff or new date."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        for life in seen.lives.values():
            for delivery in life.deliveries:
                yield from self._delay(seen, life, delivery)
                yield from self._moves(life, delivery)
        for life, first, second in seen.pairs():
            yield from self._backoff(seen, life, first, second)

    def _delay(self, seen: Evidence, life: Life, delivery: Delivery) -> Iterator[str]:
        sent = seen.history.sent.get(delivery.got.name)
        if sent is None or any(move.started < delivery.call.ended for move in life.moves):
            return
        if sent.delay is not None:
            due = delivery.got.enqueued_ms + round(sent.delay * 1000)
            if delivery.decided < due:
                yield f"{sent.name} was due at {due} and delivered at {delivery.decided} (call {delivery.call.number})"
        if sent.deliver_at_ms is not None:
            latest = self._latest_wall(seen.history, delivery.call)
            if latest < sent.deliver_at_ms:
                yield (
                    f"{sent.name} was to be delivered at {sent.deliver_at_ms} by the wall clock, which had never "
                    f"passed {latest} when call {delivery.call.number} got it"
                )

    @staticmethod
    def _latest_wall(history: History, call: Call) -> int:
        """The highest value that the wall clock has shown up to the end of a call."""
        return max([call.wall_end, *(note.wall_ms for note in history.notes if note.order < call.ended)])

    @staticmethod
    def _moves(life: Life, delivery: Delivery) -> Iterator[str]:
        before = [move for move in life.moves if move.started < delivery.call.ended]
        if not before:
            return
        last = max(before, key=lambda move: move.started)
        if last.outcome != "ok" or last.args.get("delay") is None or any(m.ended > last.started for m in before[:-1]):
            return
        if last.ended > delivery.call.started and delivery.call.started < last.started:
            return  # they ran concurrently: the pop may have been first
        start = last.decided_after
        if start is not None and delivery.decided < start + round(last.args["delay"] * 1000) - SLACK_MS:
            yield (
                f"{life.id} was put off by call {last.number} at {start} for {last.args['delay']} s "
                f"and delivered at {delivery.decided} (call {delivery.call.number})"
            )

    def _backoff(self, seen: Evidence, life: Life, first: Delivery, second: Delivery) -> Iterator[str]:
        moved = any(first.call.started < c.ended and c.started < second.call.ended for c in life.moves + seen.replays)
        if moved:
            return
        named = [c for c in life.returns if is_on(c, first.got)]
        held_until = SingleLease._held_until(life, first)
        earliest = held_until + self._least(seen, first)
        for call in named:
            if call.verb != "nack" or call.decided_after is None:
                return  # a release returns it immediately; a bury only by a replay
            backoff = call.args.get("backoff")
            wait = self._least(seen, first) if backoff is None else round(backoff * 1000)
            rested = call.decided_after + wait
            earliest = rested if call.outcome == "ok" else min(earliest, rested)
        if second.decided < earliest - SLACK_MS:
            yield (
                f"{life.id} failed in call {first.call.number} and was due again at {earliest}, "
                f"but was delivered in call {second.call.number} at {second.decided}"
            )

    @staticmethod
    def _least(seen: Evidence, failed: Delivery) -> int:
        """Return the shortest backoff that the topic allows after this delivery, in ms."""
        backoff = seen.config.backoff
        wait = min(backoff.max, backoff.base * backoff.factor ** (failed.got.attempts - 1))
        return int(wait * (1 - backoff.jitter) * 1000)


class AttemptsCounted:
    """`attempts` is 1 at first, one more after each failure, unchanged after a release; and it has a maximum."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        for life in seen.lives.values():
            low = high = 0  # deliveries that counted before
            before = min((c.started for name in life.names for c in seen.sends[name]), default=0)
            for delivery in life.deliveries:
                unseen = [p for p in seen.unsure_pops if p.ended > before and p.started < delivery.call.ended]
                if any(c.ended > before and c.started < delivery.call.ended for c in seen.replays):
                    low = 0
                high += len(unseen)
                got = delivery.got
                if not low + 1 <= got.attempts <= high + 1:
                    yield (
                        f"{life.id} was delivered as attempt {got.attempts} in call {delivery.call.number}; "
                        f"{low + 1} to {high + 1} are possible"
                    )
                limit = self._limit(seen, got.name)
                if got.attempts > limit:
                    yield f"{life.id} was delivered as attempt {got.attempts} of {limit} in call {delivery.call.number}"
                low = high = got.attempts
                releases = [c for c in life.returns if c.verb == "release" and is_on(c, got)]
                if releases:
                    low -= 1
                    high -= any(c.outcome == "ok" for c in releases)
                before = delivery.call.started

    @staticmethod
    def _limit(seen: Evidence, name: str) -> int:
        sent = seen.history.sent.get(name)
        retries = sent.max_retries if sent is not None else None
        return 1 + (seen.config.max_retries_default if retries is None else retries)


class NoFalseAlarm:
    """Corruption is reported only for bytes that were damaged or unreadable."""

    def complaints(self, seen: Evidence) -> Iterator[str]:
        if seen.topic in seen.history.damaged:
            return
        for call in seen.history.calls:
            if call.topic != seen.topic or call.ended > seen.history.reads_failed:
                continue
            if "batch" in call.args and seen.history.damaged:
                continue  # it concerns several topics, and one of them is damaged
            if call.error is not None and "Corrupt" in type(call.error).__name__:
                yield f"call {call.number} got {call.error}, though nothing was damaged"
        for rows in seen.listed.values():
            for dead, call in rows:
                if "corrupt" in dead.reason and call.started < seen.history.reads_failed:
                    yield f"{dead.id} is {dead.reason!r} in call {call.number}, though nothing was damaged"


ALL: tuple[Checker, ...] = (
    NoLostMessage(), RefusedChangesNothing(), PayloadIntact(), SingleLease(), StrictOrder(), NeverEarly(),
    NoDoubleEnqueue(), AckedStaysGone(), BatchAllOrNothing(), AttemptsCounted(), NoFalseAlarm(),
    KeyLimit(),
)  # fmt: skip


def judge(history: History, checkers: tuple[Checker, ...] = ALL) -> list[str]:
    """Return all complaints, each with the name of its promise."""
    found = []
    evidence = {topic: Evidence(history, topic) for topic in history.topics}
    for topic, seen in evidence.items():
        for checker in checkers:
            found += [f"{type(checker).__name__} [{topic}]: {text}" for text in checker.complaints(seen)]
    found += [f"{BatchAllOrNothing.__name__} [prepared]: {text}" for text in prepared_complaints(history, evidence)]
    return found


__all__ = [
    "ALL", "AckedStaysGone", "AttemptsCounted", "BatchAllOrNothing", "Checker", "KeyLimit", "NeverEarly",
    "NoDoubleEnqueue", "NoFalseAlarm", "NoLostMessage", "PayloadIntact", "RefusedChangesNothing", "SingleLease",
    "StrictOrder", "judge",
]  # fmt: skip
