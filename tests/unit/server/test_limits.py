"""Limits count correctly in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, RateLimited, ResourceExhausted
from heapline.contract.messages import Enqueue, EnqueueBatch, NewMessages
from heapline.contract.topics import Stats
from heapline.server import limits
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.gate import Gate
from heapline.server.limits import Counter, Limits, PrincipalRates


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


# -- rates of principals -----------------------------------------------------------------------------------------------


def accepts(rates: PrincipalRates, subject: str) -> bool:
    try:
        rates.take(subject, Stats("jobs"))
    except RateLimited:
        return False
    return True


def test_rate_of_calls_is_kept_and_each_principal_has_its_own() -> None:
    now = [0]
    rates = PrincipalRates(Limits(calls_per_second=10.0), lambda: now[0])
    accepted = {"key:a": 0, "key:b": 0}
    for now[0] in range(0, 5000, 5):
        accepted["key:a"] += accepts(rates, "key:a")
        if now[0] % 500 == 0:
            accepted["key:b"] += accepts(rates, "key:b")
    assert accepted == {"key:a": 10 + 49, "key:b": 10}
    with pytest.raises(RateLimited, match=r"calls per second of key:a .*limit of 10.* retry in 1 s"):
        rates.take("key:a", Stats("jobs"))


def test_batch_over_the_rate_of_messages_delays_the_next_and_reads_are_free() -> None:
    now = [0]
    rates = PrincipalRates(Limits(messages_per_second=10.0), lambda: now[0])
    batch = EnqueueBatch("jobs", NewMessages([b""] * 40))
    rates.take("key:a", batch)
    for now[0] in (0, 3000):
        with pytest.raises(RateLimited, match="enqueued messages per second of key:a"):
            rates.take("key:a", Enqueue("jobs", b"x"))
        rates.take("key:a", Stats("jobs"))
    now[0] = 3100  # 40 taken, 10 at the start and 31 since
    rates.take("key:a", Enqueue("jobs", b"x"))
    with pytest.raises(RateLimited):
        rates.take("key:a", Enqueue("jobs", b"x"))


def test_rejected_enqueue_takes_no_call() -> None:
    rates = PrincipalRates(Limits(calls_per_second=3.0, messages_per_second=1.0), lambda: 0)
    rates.take("key:a", Enqueue("jobs", b"x"))
    for _ in range(5):
        with pytest.raises(RateLimited, match="messages"):
            rates.take("key:a", Enqueue("jobs", b"x"))
    rates.take("key:a", Stats("jobs"))
    rates.take("key:a", Stats("jobs"))


def test_buckets_of_principals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUCKETS_MAX", 5)
    rates = PrincipalRates(Limits(calls_per_second=1.0), lambda: 0)
    for n in range(50):
        rates.take(f"key:{n}", Stats("jobs"))
    assert len(rates._calls._buckets) == 5


@pytest.mark.parametrize("rate", [-1.0, 0.0001, 2e6, float("nan")])
@pytest.mark.parametrize("name", ["calls_per_second", "messages_per_second"])
def test_rate_that_is_no_rate_is_refused(name: str, rate: float) -> None:
    with pytest.raises(BadRequest, match=name):
        Limits(**{name: rate}).validate()
