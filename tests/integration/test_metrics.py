"""`GET /metrics` of a real server: the specified names, their counts, and who may read them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from heapline.contract.errors import HeaplineError, TopicNotFound
from heapline.contract.message import Outgoing
from heapline.server.telemetry.broker_metrics import FAMILIES
from tests.integration.server_rig import Keys, Requests, Rig, pop_start, until

SPECIFIED = {
    "enqueue_latency_ms": {"topic"}, "pop_latency_ms": {"topic"}, "inflight": {"topic"},
    "backlog": {"topic", "partition"}, "retries_total": {"topic"}, "dlq_total": {"topic"},
    "lease_timeouts_total": {"topic"}, "raft_apply_latency_ms": {"partition"}, "snapshot_bytes": {"partition"},
    "wal_bytes_written_total": set(),
}  # fmt: skip


async def scrape(rig: Rig, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://127.0.0.1:{rig.server.http_port}/metrics", headers=headers)


def samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


async def read(rig: Rig) -> dict[tuple[str, ...], float]:
    """Return values by name and by the values of the labels in the order of their names."""
    response = await scrape(rig)
    assert response.status_code == 200
    return {(s.name, *(v for _, v in sorted(s.labels.items()))): s.value for s in samples(response.text)}


async def go_through_a_life(rig: Rig) -> None:
    """Ten messages: five acked, one nacked, one buried, two whose lease expires, one left; one more is delayed."""
    await rig.wire.create_topic("jobs", partitions=2, visibility_default=1.0)
    await rig.wire.enqueue_batch("jobs", [Outgoing(b"x", key=str(i)) for i in range(10)])
    await rig.wire.enqueue("jobs", b"later", delay=3600)
    messages = await rig.wire.pop("jobs", 9)
    await rig.wire.ack(messages[:5])
    await messages[5].nack(backoff=3600)
    await messages[6].bury()
    rig.clock.advance(2000)

    async def leases_ended() -> bool:
        return await rig.leased() == 0

    await until(leases_ended)
    await rig.wire.snapshot("jobs")


async def test_every_metric_of_the_specification_is_exposed_under_its_exact_name(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await go_through_a_life(rig)
        response = await scrape(rig)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, set[str]] = {}
    for sample in samples(response.text):
        name = sample.name.removesuffix("_bucket")
        found.setdefault(name, set()).update(set(sample.labels) - {"le"})
    for name, labels in SPECIFIED.items():
        assert name in found, f"{name} is missing among {sorted(found)}"
        assert labels <= found[name] <= labels | {"topic"}, name


async def test_exactly_the_families_of_the_table_are_exposed_with_their_labels(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await go_through_a_life(rig)
        rig.server.metrics.watch(
            "fsync_latency_ms", rig.behind.topics.runner("jobs").counters.commit.tally
        )  # a fake disk
        await rig.behind.create_group("jobs", "followers")
        requests = Requests(pop_start(credits=1))
        stream = rig.wire.calls.stream("PopStream", requests)
        await anext(stream)
        response = await scrape(rig)
        requests.end()
        await stream.aclose()  # type: ignore[attr-defined]
    found: dict[str, set[frozenset[str]]] = {}
    for sample in samples(response.text):
        name = sample.name
        for end in ("_bucket", "_count", "_sum"):
            name = name.removesuffix(end)
        found.setdefault(name, set()).add(frozenset(sample.labels) - {"le"})
    for family in FAMILIES:
        assert found.pop(family.name, None) == {frozenset(family.labels)}, family.name
    assert {name for name in found if not name.startswith("process_")} == set()


async def test_metrics_count_every_event(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await go_through_a_life(rig)
        got = await read(rig)
        stats = await rig.behind.stats("jobs")
    assert got["enqueued_total", "jobs"] == 11
    assert got["leased_total", "jobs"] == 9
    assert got["acked_total", "jobs"] == 5
    assert got["retries_total", "jobs"] == 3
    assert got["lease_timeouts_total", "jobs"] == 2
    assert got["dlq_total", "jobs"] == 1
    assert got["inflight", "jobs"] == 0
    assert [got["backlog", str(p.partition), "jobs"] for p in stats.partitions] == [p.ready for p in stats.partitions]
    assert sum(got["delayed", str(p), "jobs"] for p in (0, 1)) == stats.delayed
    assert got["enqueue_latency_ms_count", "jobs"] == 2  # per call, not per message
    assert got["pop_latency_ms_count", "jobs"] == 1
    assert got["commit_latency_ms_count", "jobs"] == got["commits_total", "jobs"] > 4
    assert got["raft_apply_latency_ms_sum", "all", "jobs"] == got["commit_latency_ms_sum", "jobs"] > 0
    assert got["wal_bytes_written_total",] == stats.log.journal_bytes_written_total > 0
    assert got["snapshot_bytes", "all", "jobs"] > 0
    assert got["snapshots_total", "jobs"] == 1
    assert got["calls_total", "EnqueueBatch", "OK", "grpc"] == 1
    assert got["call_duration_ms_count", "EnqueueBatch", "grpc"] == 1
    assert got["disk_free_bytes",] > 0
    assert got["topic_serving", "jobs"] == 1


async def test_lease_expired_on_its_last_attempt_counts_as_timeout_and_dead_letter(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.wire.create_topic("jobs", visibility_default=1.0, max_retries_default=0)
        await rig.wire.enqueue("jobs", b"x")
        await rig.wire.pop("jobs")
        rig.clock.advance(2000)

        async def dead() -> bool:
            return (await rig.behind.stats("jobs")).dead == 1

        await until(dead)
        got = await read(rig)
    assert got["lease_timeouts_total", "jobs"] == 1
    assert got["dlq_total", "jobs"] == 1
    assert got["retries_total", "jobs"] == 0


async def test_duration_of_a_waiting_pop_counts_from_the_messages_arrival(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.wire.create_topic("jobs")
        runner = rig.behind.topics.runner("jobs")
        requests = Requests(pop_start(credits=1))
        stream = rig.wire.calls.stream("PopStream", requests)
        waiting = asyncio.ensure_future(anext(stream))

        async def waits() -> bool:
            return any(not pop.began for pop in runner.turns.pops)

        await until(waits)
        await rig.wire.enqueue("jobs", b"x")
        await waiting
        got = await read(rig)
        assert got["streams_open", "PopStream", "grpc"] == 1
        requests.end()
        await stream.aclose()  # type: ignore[attr-defined]
    assert got["pop_latency_ms_count", "jobs"] == 1
    assert got["pop_latency_ms_sum", "jobs"] < 60_000  # not the time since perf_counter's zero


async def test_refused_and_failed_calls_are_counted_by_their_code(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        with pytest.raises(TopicNotFound):
            await rig.wire.enqueue("nowhere", b"x")
        with pytest.raises(HeaplineError):
            await rig.wire.get("nowhere", 1)
        got = await read(rig)
    assert got["calls_total", "Enqueue", "NOT_FOUND", "grpc"] == 1
    assert got["calls_open", "Enqueue", "grpc"] == 0
    assert not any("nowhere" in labels for labels in got)  # names that callers invent create no series


async def test_series_of_a_deleted_topic_end_but_its_written_bytes_still_count(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await go_through_a_life(rig)
        before = await read(rig)
        await rig.wire.delete_topic("jobs")
        after = await read(rig)
        await rig.wire.create_topic("jobs")
        await rig.wire.enqueue("jobs", b"x")
        again = await read(rig)
    assert not [labels for labels in after if "jobs" in labels]
    assert after["wal_bytes_written_total",] == before["wal_bytes_written_total",]
    assert again["wal_bytes_written_total",] > after["wal_bytes_written_total",]
    assert again["enqueued_total", "jobs"] == 1


@pytest.mark.parametrize(
    ("public", "key", "status"),
    [(None, None, 200), (True, None, 200), (False, None, 401), (False, "one", 403), (False, "all", 200)],
)
async def test_metrics_need_a_key_for_all_topics_unless_they_are_public(
    tmp_path: Path, public: bool | None, key: str | None, status: int
) -> None:
    guard = Keys(**{"Bearer one": "jobs:consume", "Bearer all": "*:consume"})
    async with Rig(tmp_path, guard, metrics_public=public) as rig:
        response = await scrape(rig, key)
    assert response.status_code == status
    assert ("build_info" in response.text) == (status == 200)


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("0.0.0.0", 401)])
async def test_metrics_need_no_key_only_on_loopback(tmp_path: Path, host: str, status: int) -> None:
    async with Rig(tmp_path, Keys(), host=host) as rig:
        assert (await scrape(rig)).status_code == status


async def test_schedule_metrics_count_fired_missed_and_late_firings(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await rig.wire.create_topic("jobs")
        await rig.wire.create_schedule("a", every=60, topic="jobs")
        await rig.wire.create_schedule("b", every=60, topic="jobs")
        rig.clock.advance(60)
        await rig.behind.fire_schedules()
        rig.clock.advance(600)
        await rig.behind.fire_schedules()
        response = await read(rig)
    assert response["schedules",] == 2
    assert response["schedule_fired_total",] == 4
    assert response["schedule_missed_total",] == 2
    assert response["schedules_failing",] == response["schedule_failures_total",] == 0
    assert response["schedule_delay_ms_count",] == 4
    assert not [labels for labels in response if "schedules" in labels[1:]], "their journal is not a user's topic"
