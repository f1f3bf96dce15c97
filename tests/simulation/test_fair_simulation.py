"""Fair topics in the simulator: crashes, failed writes and reloads while keys take turns, are blocked and unblocked.

All promises are checked, the order by priority. In addition, no key ever has more leases in the engine than allowed,
and the drain at the end shows that no message stays parked.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from heapline.core.events import Leased
from heapline.core.fairness.keys import NO_KEY
from heapline.engine.topic import Topic
from tests.simulation import simulate


@pytest.fixture
def too_many(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every topic of the simulator a fair one; record leases over the limit."""
    apply = Topic._apply
    found: list[str] = []

    def fair_config(rng: random.Random) -> dict[str, Any]:
        limit = rng.choice((0, 1, 2, 2, 5))
        return {"ordering": "strict", "fairness": "keys", "max_inflight_per_key": limit}

    def watched(self: Topic, partition: Any, event: Any, *rest: Any) -> None:
        apply(self, partition, event, *rest)
        if isinstance(event, Leased) and self.fair is not None and self.fair.limit:
            leased = [p.fairness.leased_keys() for p in self.partitions if p.fairness is not None]
            keys, counts = np.unique(np.concatenate(leased), return_counts=True)
            if (counts[keys != NO_KEY] > self.fair.limit).any():
                found.append(f"{counts} leases with a limit of {self.fair.limit}")

    monkeypatch.setattr(simulate, "delivery_config", fair_config)
    monkeypatch.setattr(Topic, "_apply", watched)
    return found


@pytest.mark.parametrize("seed", range(1, 5))
def test_promises_hold_where_keys_take_turns(too_many: list[str], seed: int) -> None:
    report = simulate.simulate(seed, 200, rot=False)
    assert report.complaints == [], report.text()
    assert too_many == []
    assert report.history.drained == set(report.history.topics)


def test_selection_in_two_units_is_one_step_of_the_rank_audit() -> None:
    """Its second half was waiting when its first unit ended, and is not better because of that."""
    report = simulate.simulate(76)
    assert report.complaints == [], report.text()
