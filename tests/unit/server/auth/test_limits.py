"""Limits count right, whatever happens in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.errors import BadRequest, PayloadTooLarge, ResourceExhausted
from heapline.server.auth import LOCAL, Limiter, Limits
from heapline.server.auth.limits import Counter


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


def test_stream_over_the_limit_is_refused_and_one_that_fails_gives_its_place_back() -> None:
    limiter = Limiter(Limits(streams_per_key=1))

    def fail() -> None:
        with limiter.streams.hold(LOCAL.subject):
            with (
                pytest.raises(ResourceExhausted, match="open streams of local is at its limit of 1"),
                limiter.streams.hold(LOCAL.subject),
            ):
                pass
            raise RuntimeError("the stream broke")  # fmt: skip

    for _ in range(3):
        with pytest.raises(RuntimeError):
            fail()
    assert limiter.streams.room(LOCAL.subject) == 1


def test_payload_over_the_servers_limit_is_refused() -> None:
    limits = Limits(payload_bytes_max=10)
    limits.check_payload(10, "jobs")
    with pytest.raises(PayloadTooLarge):
        limits.check_payload(11, "jobs")


@pytest.mark.parametrize("name", ["streams_per_key", "inflight_per_key", "leases_per_consumer", "payload_bytes_max"])
def test_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        Limiter(Limits(**{name: 0}))
