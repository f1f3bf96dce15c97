"""Views of several samples: rates, curves, percentiles, and the order and filter of topics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.cli.top.columns import age, bar, chart, short, sparkline
from heapline.cli.top.sampler import SORTS, Rates, Sample, TopicWatch, Watch, percentile_ms, sample
from heapline.contract.errors import DeadlineExceeded, JournalCorrupt, PermissionDenied, TopicNotFound
from heapline.contract.message import DueBucket, LatencyHistogram, PartitionStats, TopicInfo, TopicStats
from tests.unit.cli.top.rig import BOUNDS, busy, stats


def watch_of(*looks: tuple[float, dict[str, TopicStats | str]]) -> Watch:
    watch = Watch()
    for at, topics in looks:
        watch.add(Sample(at, topics))
    return watch


def test_rates_are_increases_per_second_between_two_samples() -> None:
    later = stats(enqueued_total=300, acked_total=100, leased_total=110, nacked_total=8, lease_timeouts_total=2,
                  dead_total=4)  # fmt: skip
    watch = watch_of((10.0, {"jobs": stats(enqueued_total=100)}), (12.0, {"jobs": later}))
    assert watch.topics["jobs"].rates == Rates(100, 50, 55, 4, 1, 2)
    assert watch.totals()[4:6] == (100, 50)


def test_one_sample_has_no_rates() -> None:
    watch = watch_of((1.0, {"jobs": stats(enqueued_total=100)}))
    assert watch.topics["jobs"].rates is None
    assert watch.totals().enqueued is None
    assert list(watch.topics["jobs"].entered) == [None]


def test_decreased_total_has_no_rate_until_the_next_sample() -> None:
    looks = [(float(n), {"jobs": stats(enqueued_total=total)}) for n, total in enumerate((1000, 1100, 5, 15))]
    topic = watch_of(*looks).topics["jobs"]  # type: ignore[arg-type]
    assert list(topic.entered) == [None, 100, None, 10]


def test_failed_samples_are_gaps_and_the_next_rate_covers_the_gap() -> None:
    watch = watch_of((0.0, {"jobs": stats()}), (1.0, {"jobs": stats(enqueued_total=10)}))
    watch.miss()
    watch.add(Sample(3.0, {"jobs": stats(enqueued_total=50)}))
    assert list(watch.topics["jobs"].entered) == list(watch.entered) == [None, 10, None, 20]


def test_topic_without_statistics_keeps_its_last_numbers_and_has_no_rates() -> None:
    watch = watch_of((0.0, {"jobs": stats()}), (1.0, {"jobs": stats(ready=7)}), (2.0, {"jobs": "reloading"}))
    topic = watch.topics["jobs"]
    assert (topic.trouble, topic.rates, topic.stats and topic.stats.ready) == ("reloading", None, 7)


def test_deleted_topic_is_removed_from_the_list() -> None:
    assert list(watch_of((0.0, {"a": stats(), "b": stats()}), (1.0, {"b": stats()})).topics) == ["b"]


def test_partition_rates_are_leases_per_second() -> None:
    def look_at(*taken: int) -> TopicStats:
        parts = [PartitionStats(partition=n, ready=0, delayed=0, leased=0, dead=0, offset=0, leased_total=total)
                 for n, total in enumerate(taken)]  # fmt: skip
        return stats(partitions=parts)

    watch = watch_of((0.0, {"jobs": look_at(5, 5)}), (2.0, {"jobs": look_at(9, 5, 2)}))
    assert watch.topics["jobs"].served == {0: 2, 1: 0, 2: 1}


def test_latencies_cover_the_last_samples() -> None:
    def look_at(*counts: int) -> TopicStats:
        return stats(latencies={"commit": LatencyHistogram(bounds_ms=BOUNDS, counts=list(counts), sum_ms=0.0)})

    topic = TopicWatch("jobs")
    topic.add(0.0, look_at(0, 0, 1000, 0))
    assert topic.latency("commit").p50 == 55
    topic.add(1.0, look_at(10, 0, 1000, 0))
    assert topic.latency("commit") == (0.5, 0.99)
    assert topic.latency("pop") == (None, None)


def test_due_within_counts_the_buckets_up_to_then() -> None:
    topic = TopicWatch("jobs")
    topic.add(0.0, busy("jobs"))
    assert (topic.due_within(10), topic.due_within(60)) == (7, 15)


@pytest.mark.parametrize("sort", SORTS)
def test_every_sort_order_is_largest_first_then_by_name_and_reversible(sort: Any) -> None:
    kinds = {"oldest": "oldest_ready_age", "in": "enqueued_total", "out": "acked_total"}
    field = kinds.get(sort, sort)
    numbers = {"a": 1, "b": 3, "c": 3, "d": 2}

    def figure(number: int) -> dict[str, Any]:
        if sort == "due":
            return {"due_histogram": [DueBucket(60, number), DueBucket(600, 9)]}
        return {} if sort == "name" else {field: number}

    looks: list[tuple[float, dict[str, TopicStats | str]]] = [
        (0.0, {name: stats(name) for name in numbers}),
        (1.0, {name: stats(name, **figure(number)) for name, number in numbers.items()}),
    ]
    watch = watch_of(*looks)
    expected = "abcd" if sort == "name" else "bcda"
    assert "".join(row.name for row in watch.rows(sort)) == expected
    assert "".join(row.name for row in watch.rows(sort, reverse=True)) == expected[::-1]


def test_only_topics_with_the_word_in_their_names_are_shown() -> None:
    watch = watch_of((0.0, {name: stats(name) for name in ("mail/send", "mail/bounce", "jobs")}))
    assert [row.name for row in watch.rows("name", only="MAIL/")] == ["mail/bounce", "mail/send"]
    assert len(watch.topics) == 3


# -- figures -----------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e20))
def test_numbers_fit_into_five_characters(number: float) -> None:
    assert len(short(number)) <= 5
    assert len(short(int(number))) <= 5


@given(st.floats(0, 1e9))
def test_ages_fit_into_six_characters(seconds: float) -> None:
    assert len(age(seconds)) <= 6


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=40), st.integers(1, 30), st.integers(1, 4))
def test_charts_have_their_size_and_a_higher_value_never_a_lower_column(
    values: list[float | None], width: int, height: int
) -> None:
    lines = chart(values, width, height)
    assert [len(line) for line in lines] == [width] * height
    heights = [sum(" ▁▂▃▄▅▆▇█".index(line[at]) for line in lines) for at in range(width)]
    shown = list(zip(values[-width:], heights[-len(values[-width:]) :], strict=True)) if values else []
    known = sorted((value, high) for value, high in shown if value is not None)
    assert [high for _, high in known] == sorted(high for _, high in known)
    assert all(high == 0 for value, high in shown if value is None)
    assert all(high >= 1 for _, high in known)
    if known and known[-1][0]:
        assert known[-1][1] == height * 8


def test_sparkline_shows_the_newest_values_on_the_right() -> None:
    assert sparkline([8, 8, 1, 2, 4], 3) == "▂▄█"
    assert sparkline([4], 3) == "  █"


@given(st.floats(0, 1), st.integers(1, 50))
def test_bars_never_exceed_their_width(share: float, width: int) -> None:
    assert len(bar(share, width)) <= width
    assert bool(bar(share, width)) == (share > 0)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.sampled_from([1, 50, 99, 100]))
def test_percentile_is_in_the_bucket_of_that_rank(counts: list[int], percent: int) -> None:
    found = percentile_ms(BOUNDS, counts, percent)
    if not sum(counts):
        assert found is None
        return
    edges = [0.0, *BOUNDS, BOUNDS[-1]]
    rank, seen = sum(counts) * percent / 100, 0
    for index, number in enumerate(counts):
        seen += number
        if number and seen >= rank:
            assert found is not None
            assert edges[index] <= found <= edges[index + 1]
            return


# -- looking -----------------------------------------------------------------------------------------------------------


class ScriptedBroker:
    """A broker with the two methods that sampling calls."""

    def __init__(self, **topics: TopicStats | Exception) -> None:
        self.topics = topics
        self.asked = 0

    async def list_topics(self) -> list[TopicInfo]:
        return [TopicInfo(name=name, incarnation=1, config=None) for name in self.topics]  # type: ignore[arg-type]

    async def stats(self, name: str) -> TopicStats:
        self.asked += 1
        output = self.topics[name]
        if isinstance(output, Exception):
            raise output
        return output


def looked(**topics: TopicStats | Exception) -> dict[str, TopicStats | str]:
    return dict(asyncio.run(sample(ScriptedBroker(**topics))).topics)  # type: ignore[arg-type]


def test_error_of_one_topic_is_shown_in_its_row() -> None:
    good = stats()
    output = looked(
        good=good, gone=TopicNotFound("gone"), mine=PermissionDenied("ann", "consume", "mine"),
        late=DeadlineExceeded("Stats"), bad=JournalCorrupt("1.seg", 2, "torn"),
    )  # fmt: skip
    assert output == {
        "good": good, "mine": "no permission", "late": "no answer", "bad": "damaged: see heapline journal verify",
    }  # fmt: skip


def test_sampling_stops_when_the_server_answers_for_no_topic() -> None:
    broker = ScriptedBroker(**{f"t{n}": DeadlineExceeded("Stats") for n in range(100)})
    with pytest.raises(DeadlineExceeded):
        asyncio.run(sample(broker))  # type: ignore[arg-type]
    assert broker.asked < 40
