"""Rates by namespace and limits on created topics, against a naive count of the admitted requests."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadName, BadRequest, RateLimited, ResourceExhausted
from heapline.server import limits
from heapline.server.limits import MQueueRules, NamespaceRates
from heapline.server.settings import ServerSettings, read_settings


class Rig:
    def __init__(self, **rules: object) -> None:
        self.now = 0
        self.rates = NamespaceRates(MQueueRules(**rules), lambda: self.now)  # type: ignore[arg-type]

    def ask(self, *namespaces: str) -> int:
        """Return 0, or the seconds to wait."""
        try:
            self.rates.take(namespaces)
        except RateLimited as error:
            return error.retry_after
        return 0


@given(
    st.sampled_from([0.5, 1.0, 3.0, 40.0]), st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    st.lists(st.tuples(st.integers(0, 4000), st.sets(st.sampled_from("abc"), min_size=1)), max_size=60),
)  # fmt: skip
def test_namespace_gets_at_least_its_rate_and_at_most_rate_plus_burst(
    rate: float, burst: float, steps: list[tuple[int, set[str]]]
) -> None:
    rig = Rig(rate=rate, burst=burst)
    let_in: dict[str, list[int]] = {name: [] for name in "abc"}
    for wait, names in steps:
        rig.now += wait
        again = rig.ask(*names)
        if again == 0:
            for name in names:
                let_in[name].append(rig.now)
        else:
            assert 1 <= again <= ceil(1 / rate)
            before = rig.now
            rig.now += again * 1000
            assert rig.ask(*names) == 0, "it returned when to retry"
            for name in names:
                let_in[name].append(rig.now)
            assert rig.now > before
    size = max(1.0, rate * burst)
    for moments in let_in.values():
        for i, start in enumerate(moments):
            for j, end in enumerate(moments[i:], 1):
                assert j <= size + rate * (end - start) / 1000 + 1e-6


def test_rejected_namespace_consumes_nothing_of_another() -> None:
    rig = Rig(rate=1.0, burst=1.0)
    assert rig.ask("a") == 0
    assert [rig.ask("a", "b") for _ in range(3)] == [1, 1, 1]
    assert [rig.ask("b"), rig.ask("b")] == [0, 1]


def test_invented_namespaces_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUCKETS_MAX", 100)
    rig = Rig(rate=1.0, burst=1.0)
    for i in range(1000):
        assert rig.ask(f"n{i}") == 0
        assert rig.ask("kept") in (0, 1)  # it sends requests all the time, so it is remembered
    assert len(rig.rates) == 100
    assert rig.ask("kept") == 1


def test_namespaces_without_a_limit_are_not_remembered() -> None:
    rig = Rig(rate=0.0, rates={"slow": 1.0})
    assert [rig.ask(f"n{i}") for i in range(1000)] == [0] * 1000
    assert len(rig.rates) == 0
    assert [rig.ask("slow"), rig.ask("slow", "n1")] == [0, 1]


def test_topics_are_limited_per_namespace_and_in_total() -> None:
    rules = MQueueRules(topics_per_namespace_max=3, topics_max=5)
    rules.check_room(["a"], ["a", "a", "b"])
    rules.check_room(["c", "c"], ["a", "a", "a"])
    rules.check_room([], ["a"] * 100)  # no topic is created
    for new, there in ((["a", "a"], ["a", "a"]), (["a"], ["a"] * 3), (["c"], ["a", "a", "b", "b", "b"])):
        with pytest.raises(ResourceExhausted):
            rules.check_room(new, there)


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        (MQueueRules(rate=-1), BadRequest),
        (MQueueRules(rate=1e-9), BadRequest),
        (MQueueRules(rate=float("nan")), BadRequest),
        (MQueueRules(rates={"a": 1e9}), BadRequest),
        (MQueueRules(rates={"a/b": 1.0}), BadName),
        (MQueueRules(burst=-1), BadRequest),
        (MQueueRules(burst=float("inf")), BadRequest),
    ],
)
def test_invalid_rate_rules_are_refused(rules: MQueueRules, error: type[Exception]) -> None:
    with pytest.raises(error):
        rules.validate()
    MQueueRules(rate=5, rates={"a": 0}).validate()


def test_rules_come_from_the_server_s_settings_and_are_checked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAPLINE_MQUEUE_RATES", '{"payments": 5}')
    monkeypatch.setenv("HEAPLINE_MQUEUE_CREATES_TOPICS", "false")
    rules = read_settings(mqueue_rate=2.5).mqueue_rules()
    assert rules == MQueueRules(creates_topics=False, rate=2.5, rates={"payments": 5.0})
    assert MQueueRules() == ServerSettings().mqueue_rules()  # the same defaults
    for bad in ({"mqueue_rate": -1}, {"mqueue_rate": 1e-6}, {"mqueue_rates": {"a/b": 1}}, {"mqueue_burst": 1e9}):
        with pytest.raises((BadRequest, BadName)):
            read_settings(**bad)
