"""The spine protocol with one clause removed at a time: every mutant must make the oracle complain.

A clause whose removal no test detects is either not needed or not tested.
"""

from __future__ import annotations

import msgspec

from tests.simulation.spine_protocol.coordinator import Spine
from tests.simulation.spine_protocol.messages import (
    NOTHING,
    Cancel,
    LeaseRequest,
    OpenEpoch,
    Place,
    Publish,
    Rebudget,
    ToPartition,
)
from tests.simulation.spine_protocol.publisher import Durable, LocalQueue, Publisher

# --- publishers -------------------------------------------------------------------------------------------------------


class CountsAgainstLastAcknowledged(Publisher):
    """The budget is counted against the last acknowledged head alone; a worse one in flight is ignored."""

    _known: Place = NOTHING
    _numbers: dict[int, Place]

    def _worst(self) -> Place:
        return self._known

    def _publish_if_moved(self, at: int) -> None:
        super()._publish_if_moved(at)
        self.__dict__.setdefault("_numbers", {})[self._number] = self._last_head

    def _heed(self, number: int) -> None:
        if number > self._acknowledged:
            self._known = self._numbers[number]
        super()._heed(number)


class CountsAgainstLastSent(Publisher):
    """The budget is counted against the head sent last, even if the spine may not have it."""

    def _worst(self) -> Place:
        return self._last_head


class HoldsNothingBack(Publisher):
    """Everything is eligible immediately, and published afterwards."""

    def _admit(self) -> None:
        self.queue.add(self._held)
        self._held.clear()


class AcceptsOutdatedRequests(Publisher):
    """A superseded request is executed."""

    def _receive_request(self, message: LeaseRequest | Cancel, at: int) -> None:
        if message.number < self.request:
            self.request = message.number - 1
        super()._receive_request(message, at)


class LeasesAgainForDoubledRequest(Publisher):
    def _receive_request(self, message: LeaseRequest | Cancel, at: int) -> None:
        if message.number == self.request:
            self.request = message.number - 1
        super()._receive_request(message, at)


class ForgetsCancellations(Publisher):
    """A cancellation is confirmed, but the request is still executed when it arrives."""

    def _receive_request(self, message: LeaseRequest | Cancel, at: int) -> None:
        before = self.request
        super()._receive_request(message, at)
        if isinstance(message, Cancel):
            self.request = before


class ServesRequestsOfEarlierBoot(Publisher):
    """A request made to the partition before it crashed, which may have ended long ago, is executed."""

    def _is_for_this_boot(self, message: LeaseRequest) -> bool:
        return True


class IgnoresLimit(Publisher):
    def _receive_request(self, message: LeaseRequest | Cancel, at: int) -> None:
        if isinstance(message, LeaseRequest):
            message = msgspec.structs.replace(message, limit=NOTHING)
        super()._receive_request(message, at)


class FencesNobody(Publisher):
    """An older spine is obeyed again."""

    def receive(self, message: ToPartition, at: int) -> None:
        if message.epoch < self.durable.epoch and not isinstance(message, OpenEpoch):
            newest, self.durable = self.durable, msgspec.structs.replace(self.durable, epoch=message.epoch)
            super().receive(message, at)
            self.durable = newest
        else:
            super().receive(message, at)


class ForgetsBootOnRestart(Publisher):
    """Numbers start again after a restart, so that older publications seem newer."""

    def __init__(self, queue: LocalQueue, durable: Durable, *, resend_ms: int = 200) -> None:
        super().__init__(queue, msgspec.structs.replace(durable, boot=0), resend_ms=resend_ms)


class TakesHeadsAsKnownOnRestart(Publisher):
    """After a restart the partition continues as if the spine had its current head."""

    def __init__(self, queue: LocalQueue, durable: Durable, *, resend_ms: int = 200) -> None:
        super().__init__(queue, durable, resend_ms=resend_ms)
        if durable.epoch:
            self._heads[0] = (self._number, queue.head() or NOTHING)


class ForgetsEpochOnRestart(Publisher):
    def __init__(self, queue: LocalQueue, durable: Durable, *, resend_ms: int = 200) -> None:
        super().__init__(queue, Durable(0, durable.boot), resend_ms=resend_ms)


class TakesOutdatedBudgets(Publisher):
    def _take_budget(self, version: int, budget: int) -> None:
        self._version, self._budget = max(version, self._version), budget


class RaisesBudgetAtOpen(Publisher):
    """A new spine's larger budget is used while others still serve the old spine."""

    def _open(self, opened: OpenEpoch, at: int) -> None:
        if opened.epoch > self.durable.epoch:
            self._budget = max(self._budget, opened.budget)
        super()._open(opened, at)


class ForgetsHeadsAtOpen(Publisher):
    """Opening an epoch forgets the heads that the old spine may still use."""

    def _open(self, opened: OpenEpoch, at: int) -> None:
        if opened.epoch > self.durable.epoch:
            self._heads.clear()
            self._heads.append((self._number, self._target()))
        super()._open(opened, at)


class TakesBudgetOfEarlierBoot(Publisher):
    def _receive_rebudget(self, message: Rebudget, at: int) -> None:
        super()._receive_rebudget(msgspec.structs.replace(message, boot=self.durable.boot), at)


class TakesOpeningBudgetTwice(Publisher):
    """A restarted partition uses a repeated OpenEpoch's budget, which may be outdated."""

    def _open(self, opened: OpenEpoch, at: int) -> None:
        if opened.epoch == self.durable.epoch:
            self._take_budget(opened.version, opened.budget)
        super()._open(opened, at)


class PublishesOnlyWhatIsHeld(Publisher):
    """Messages within the budget are never published."""

    def _target(self) -> Place:
        return self._held[0] if self._held else self._last_head


class NeverSaysItAgain(Publisher):
    def tick(self, at: int) -> None:
        pass


# --- spines -----------------------------------------------------------------------------------------------------------


class AcknowledgesDuringRequest(Spine):
    """A head better than the limit is acknowledged while the limit is in use."""

    def _may_acknowledge(self, partition: int, head: Place) -> bool:
        return True


class GivesUpOnClock(Spine):
    """A request is forgotten after a while, even if the partition may still execute it."""

    def tick(self, at: int) -> None:
        if self._asked is not None and at >= self._asked.asked_at + self._cancel_ms:
            self._asked = None
        super().tick(at)
        self._pump(at)


class SetsNoLimit(Spine):
    def _limit(self, partition: int) -> Place:
        return NOTHING


class AcknowledgesBeforeAllOpened(Spine):
    """Heads are acknowledged while partitions that have not opened the epoch still obey the old spine."""

    def _pump(self, at: int) -> None:
        if self._unfenced:
            for partition, member in list(self._unacknowledged.items()):
                assert member.seen is not None
                self._acknowledge(partition, member, member.seen)
        super()._pump(at)


class AsksBeforeAllOpened(Spine):
    """Partitions that have opened the epoch serve without waiting for the others."""

    def _is_fenced(self) -> bool:
        return True

    def _all_keep_budget(self) -> bool:
        return True

    def _set_serving(self, partition: int, member: object, serving: bool) -> None:
        super()._set_serving(partition, self._members[partition], serving)


class AdmitsBeforeBudgetIsKept(Spine):
    """A partition serves before the others keep the smaller budget."""

    def _all_keep_budget(self) -> bool:
        return all(self._members[partition].seen is not None for partition in self._announced)


class ReformsDuringRequest(Spine):
    """The set of serving partitions changes while a limit computed without the new ones is in use."""

    def _pump(self, at: int) -> None:
        if self._is_fenced() and self.deposed_by is None and not self._unacknowledged:
            self._reform()
        super()._pump(at)


class IgnoresNumbers(Spine):
    """The publication that arrives last counts as the newest."""

    def _note(self, partition: int, publication: Publish) -> None:
        member = self._members[partition]
        member.seen, member.acknowledged = None, 0
        super()._note(partition, publication)


class KeepsBudgetOfFewer(Spine):
    """The budget is not divided among the other partitions."""

    def _announce(self) -> None:
        super()._announce()
        self._budget = self._k - 1


class NeverAsksAgain(Spine):
    def tick(self, at: int) -> None:
        pass


class TakesDoubledAnswers(Spine):
    def _receive_answer(self, partition: int, answer: object) -> None:
        if self._asked is not None:
            self._asked.partition = partition
            self._asked.message = msgspec.structs.replace(self._asked.message, number=answer.request)  # type: ignore[attr-defined]
        super()._receive_answer(partition, answer)  # type: ignore[arg-type]


KINDS = [kind for kind in list(vars().values()) if isinstance(kind, type) and kind.__module__ == __name__]
PUBLISHERS = [kind for kind in KINDS if issubclass(kind, Publisher)]
SPINES = [kind for kind in KINDS if issubclass(kind, Spine)]
