"""The lifecycle table is complete: every transition happens, no other does, and the page is generated from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from heapline.contract.config import Backoff
from heapline.contract.message import Outgoing
from heapline.core import lifecycle
from heapline.core.events import KIND_NAMES, Cancelled
from heapline.core.lifecycle import ALLOWED, GONE, TRANSITIONS, WAITING
from tests.unit.core import rig_journal
from tests.unit.core.partition_rig import Rig
from tests.unit.core.test_partition_model import PartitionMachine

ROOT = Path(__file__).parents[3]
SECOND = 1000


def one(rig: Rig, **facts: float) -> int:
    (id,) = rig.enqueue(Outgoing(b"", **facts))  # type: ignore[arg-type]
    return id


def popped(rig: Rig, **facts: float) -> int:
    id = one(rig, **facts)
    assert rig.pop(visibility=SECOND) == [id]
    return id


def dead(rig: Rig) -> int:
    id = popped(rig)
    rig.bury(id)
    return id


def wait(rig: Rig, ms: int) -> None:
    rig.advance(ms)
    rig.tick()


def lapsed(rig: Rig) -> None:
    popped(rig, ttl=0.5)
    wait(rig, SECOND // 2)
    wait(rig, SECOND)


def expire_while_retrying(rig: Rig) -> None:
    rig.nack(popped(rig, ttl=1), backoff=5 * SECOND)
    wait(rig, SECOND)


def purge(rig: Rig, **facts: float) -> None:
    one(rig, **facts)
    rig.purge()


def committed(rig: Rig, **facts: float) -> None:
    rig.prepare("batch", "part", Outgoing(b"", **facts))  # type: ignore[arg-type]
    rig.commit("batch", ["part"])


SCENARIOS: dict[tuple[str, str, str], Callable[[Rig], object]] = {
    ("enqueued", "", "ready"): one,
    ("enqueued", "", "delayed"): lambda rig: one(rig, delay=1),
    ("batch_committed", "", "ready"): lambda rig: committed(rig),
    ("batch_committed", "", "delayed"): lambda rig: committed(rig, delay=1),
    ("fired", "delayed", "ready"): lambda rig: (one(rig, delay=1), wait(rig, 2 * SECOND)),
    ("leased", "ready", "leased"): popped,
    ("acked", "leased", "acked"): lambda rig: rig.ack(popped(rig)),
    ("nacked", "leased", "delayed"): lambda rig: rig.nack(popped(rig)),
    ("nacked", "leased", "ready"): lambda rig: rig.nack(popped(rig), backoff=0),
    ("lease_expired", "leased", "delayed"): lambda rig: (popped(rig), wait(rig, SECOND)),
    ("lease_expired", "leased", "ready"): lambda rig: (
        rig.configure(backoff=Backoff(base=0.0)),
        popped(rig),
        wait(rig, SECOND),
    ),
    ("released", "leased", "ready"): lambda rig: rig.release(popped(rig)),
    ("dead_lettered", "leased", "dead"): lambda rig: rig.bury(popped(rig)),
    ("dead_lettered", "leased", "dropped"): lambda rig: (rig.configure(dlq=False), rig.bury(popped(rig))),
    ("expired", "ready", "expired"): lambda rig: (one(rig, ttl=1), wait(rig, SECOND)),
    ("expired", "delayed", "expired"): expire_while_retrying,
    ("expired", "leased", "expired"): lapsed,
    ("cancelled", "ready", "cancelled"): lambda rig: rig.cancel(one(rig)),
    ("cancelled", "delayed", "cancelled"): lambda rig: rig.cancel(one(rig, delay=1)),
    ("rescheduled", "ready", "ready"): lambda rig: rig.reschedule(one(rig), priority=1),
    ("rescheduled", "ready", "delayed"): lambda rig: rig.reschedule(one(rig), due=rig.now.steady + 1),
    ("rescheduled", "delayed", "ready"): lambda rig: rig.reschedule(one(rig, delay=1), due=rig.now.steady),
    ("rescheduled", "delayed", "delayed"): lambda rig: rig.reschedule(one(rig, delay=1), priority=1),
    ("purged", "ready", "purged"): purge,
    ("purged", "delayed", "purged"): lambda rig: purge(rig, delay=1),
    ("replayed", "dead", "ready"): lambda rig: rig.replay_dead([dead(rig)]),
    ("replayed", "dead", "delayed"): lambda rig: rig.replay_dead([dead(rig)], [rig.now.steady + 5]),
    ("dead_deleted", "dead", "deleted"): lambda rig: rig.delete_dead([dead(rig)]),
}


def test_every_transition_of_the_table_has_a_scenario() -> None:
    assert SCENARIOS.keys() == ALLOWED
    assert len(TRANSITIONS) == len(ALLOWED), "a transition is in the table twice"


@pytest.mark.parametrize("transition", SCENARIOS, ids="-".join)
def test_transition_is_reached(transition: tuple[str, str, str]) -> None:
    rig = Rig()
    SCENARIOS[transition](rig)
    assert transition in rig.reached
    rig.check(look=True)
    rig.check(rig.replayed().partitions[0], look=True)


def test_random_histories_make_no_other_transition() -> None:
    """`Rig.emit` checks each event of the machine against the table; this test checks which transitions occurred."""
    reached: set[tuple[str, str, str]] = set()

    class Observed(PartitionMachine):
        def teardown(self) -> None:
            reached.update(self.rig.reached if hasattr(self, "rig") else ())
            super().teardown()

    run_state_machine_as_test(Observed, settings=settings(max_examples=15, phases=[Phase.generate]))
    assert reached <= ALLOWED
    assert len(reached) > len(ALLOWED) / 2, "the histories reach too few transitions to prove anything"


def test_transition_outside_the_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig_journal, "ALLOWED", ALLOWED - {("cancelled", "ready", "cancelled")})
    rig = Rig()
    id = one(rig)
    with pytest.raises(AssertionError, match="not a transition"):
        rig.cancel(id)


def test_table_names_known_events_and_states() -> None:
    kinds = set(KIND_NAMES.values())
    states = {*WAITING, *GONE, "leased", "dead"}
    assert KIND_NAMES[Cancelled] == "cancelled"
    for transition in TRANSITIONS:
        assert transition.event in kinds
        assert transition.before in states - set(GONE) | {""}, "nothing changes once it is gone"
        assert transition.after in states


def test_page_of_states_is_current() -> None:
    page = (ROOT / "docs" / "states.md").read_text()
    assert page == lifecycle.page(), "run: python -m heapline.core.lifecycle > docs/states.md"


def test_picture_has_an_arrow_for_each_transition() -> None:
    arrows = lifecycle.mermaid().splitlines()[1:]
    assert len(arrows) == len(TRANSITIONS)
    for arrow in arrows:
        assert arrow.count(":") == 1, "Mermaid allows one colon per line"
