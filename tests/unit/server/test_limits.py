"""Limits count correctly in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, ResourceExhausted
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.gate import Gate
from heapline.server.limits import Counter, Limits


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=40))
def test_counter_never_exceeds_its_limit_and_forgets_unused_names(steps: list[tuple[str, bool]]) -> None:
    counter, model = Counter("things", 5), {"a": 0, "b": 0}
    for name, takes in steps:
        if takes and model[name] == 5:
            with pytest.raises(ResourceExhausted):
                counter.take(name)
        elif takes:
            counter.take(name)
            model[name] += 1
        elif model[name]:
            counter.give_back(name)
            model[name] -= 1
        assert counter.held == {who: held for who, held in model.items() if held}


@pytest.mark.parametrize("name", ["streams_per_key", "inflight_per_key", "leases_per_consumer", "payload_bytes_max"])
def test_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        Gate(NoAuthGuard(), limits=Limits(**{name: 0}))
