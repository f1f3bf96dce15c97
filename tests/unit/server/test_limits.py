"""Limits count right, whatever happens in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, ResourceExhausted
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.gate import Gate
from heapline.server.limits import Counter, Limits


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-4, 4)), max_size=40))
def test_counter_is_a_count_that_never_passes_its_limit(steps: list[tuple[str, int]]) -> None:
    counter, model = Counter("things", 5), {"a": 0, "b": 0}
    for name, n in steps:
        if n >= 0:
            if model[name] + n > 5:
                with pytest.raises(ResourceExhausted):
                    counter.take(name, n)
            else:
                counter.take(name, n)
                model[name] += n
        elif model[name] >= -n:
            counter.give_back(name, -n)
            model[name] += n
        assert {who: 5 - counter.room(who) for who in model} == model
        assert len(counter) == sum(1 for held in model.values() if held)


@pytest.mark.parametrize("name", ["streams_per_key", "inflight_per_key", "leases_per_consumer", "payload_bytes_max"])
def test_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        Gate(NoAuthGuard(), limits=Limits(**{name: 0}))
