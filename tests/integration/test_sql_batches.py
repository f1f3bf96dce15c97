"""Batches over topics of several shards: all or none, even if nodes are killed and shards go down."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import heapline
import heapline.sql
from heapline import Outgoing
from heapline.contract.batches import ForgetBatch
from tests.integration.mqueue_rig import b64
from tests.integration.proxy import Proxy
from tests.integration.sql_processes import admin_key, http, sql_node
from tests.integration.test_sql_shards import topics_by_shard
from tests.postgres import fresh_schema, shared_port, shared_url

asyncpg = pytest.importorskip("asyncpg")
from heapline.sql import batches, prepared  # noqa: E402 - needs asyncpg


@pytest.fixture
async def database() -> AsyncIterator[str]:
    """The name of a second database."""
    name = fresh_schema()
    admin = await asyncpg.connect(shared_url())
    await admin.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")
    yield name
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


async def test_batch_over_shards_becomes_visible_everywhere_or_nowhere(database: str) -> None:
    one, two = topics_by_shard(2)
    async with heapline.sql.open([shared_url(), shared_url(database)], schema=fresh_schema()) as hl:
        for topic in (one, two):
            await hl.create_topic(topic)
        for batch in ("kept", "dropped"):
            await hl.prepare_batch(batch, "1", {one: [Outgoing(b"a")], two: [Outgoing(b"b", idempotency_key=batch)]})
        with pytest.raises(heapline.BatchInDoubt):
            await hl.enqueue(two, b"b", idempotency_key="kept")
        assert await hl.commit_batch("kept", ["1"]) == 2
        assert await hl.abort_batch("dropped") == 1
        assert [(await hl.pop(topic, 10))[0].payload for topic in (one, two)] == [b"a", b"b"]
        assert (await hl.enqueue(two, b"b", idempotency_key="kept")).duplicate
        assert not (await hl.enqueue(two, b"b", idempotency_key="dropped")).duplicate


async def test_names_that_postgres_cannot_store_are_refused() -> None:
    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as hl:
        await hl.create_topic("jobs")
        share = {"jobs": [Outgoing(b"x")]}
        calls = [
            hl.prepare_batch("a\0b", "1", share),
            hl.prepare_batch("b", "a\0b", share),
            hl.prepare_batch("b", "1", share, sink="a\0b", version=1),
            hl.commit_batch("b", ["a\0b"]),
            hl.commit_batch("b", ["1"], sink="a\0b", version=1),
            hl.abort_batch("a\0b"),
            hl.forget_sink("a\0b"),
        ]
        for call in calls:
            with pytest.raises(heapline.BadRequest, match="NUL"):
                await call
        assert await hl.list_batches() == []


@pytest.mark.parametrize("place", ["ready", "leased", "delayed"])
async def test_batch_whose_message_id_another_message_has_is_not_committed(place: str) -> None:
    """Two nodes minted the id. The batch stays as it is until the other message is gone."""
    schema = fresh_schema()
    admin = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
    async with heapline.sql.open([shared_url()], schema=schema) as hl:
        for topic in ("jobs", "others"):
            await hl.create_topic(topic)
        delay = 3600 if place == "delayed" else None
        share = {"others": [Outgoing(b"a")], "jobs": [Outgoing(b"b", idempotency_key="b", delay=delay)]}
        await hl.prepare_batch("b", "1", share)
        id = await admin.fetchval("SELECT id FROM prepared_keys")
        topic = "jobs" if place == "delayed" else "others"
        other = await hl.enqueue(topic, b"other", delay=delay)
        table = "delayed" if place == "delayed" else "ready"
        await admin.execute(f"UPDATE {table} SET id = $1 WHERE id = $2", id, other.id)
        if place == "leased":
            (held,) = await hl.pop("others", visibility=3600)

        async def seen() -> Any:
            stats = [await hl.stats(topic) for topic in ("jobs", "others")]
            return await hl.list_batches(), [(s.ready, s.delayed, s.leased, s.dead) for s in stats]

        before = await seen()
        for _ in range(2):
            with pytest.raises(heapline.UnavailableError, match=rf"'b' .*{id}.* items WHERE id .*commit"):
                await hl.commit_batch("b", ["1"])
            assert await seen() == before
            assert await admin.fetchval("SELECT count(*) FROM decisions") == 0
        if place == "leased":
            await held.ack()
        else:
            await hl.cancel(topic, id)
        assert await hl.commit_batch("b", ["1"]) == 2
        assert [m.payload for m in await hl.pop("others", 10)] == [b"a"]
        assert (await hl.get("jobs", id)).payload == b"b"
        assert await admin.fetchval("SELECT count(*) FROM miscounted") == 0
    await admin.close()


async def test_batch_with_a_taken_message_id_does_not_stop_the_sweep_of_others() -> None:
    schema = fresh_schema()
    admin = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
    async with heapline.sql.open([shared_url()], schema=schema) as hl:
        await hl.create_topic("jobs")
        for batch in ("a", "b"):
            await hl.prepare_batch(batch, "1", {"jobs": [Outgoing(batch.encode(), idempotency_key=batch)]})
            decided = "INSERT INTO decisions VALUES ($1, '{1}', 1, '{jobs}', NULL, NULL, clock_ms())"
            await admin.execute(decided, batch)
        id = await admin.fetchval("SELECT id FROM prepared_keys WHERE batch = 'a'")
        other = await hl.enqueue("jobs", b"other")
        await admin.execute("UPDATE ready SET id = $1 WHERE id = $2", id, other.id)
        with pytest.raises(heapline.UnavailableError, match="commit the batch again"):
            await batches.Sweeper(hl.node).sweep()
        held = await hl.pop("jobs", 10)
        assert {m.payload for m in held} == {b"other", b"b"}
        await hl.ack(held)
        await batches.Sweeper(hl.node).sweep()
        assert [m.payload for m in await hl.pop("jobs", 10)] == [b"a"]
    await admin.close()


async def test_decided_batch_is_completed_when_its_shard_returns(database: str) -> None:
    one, two = topics_by_shard(2)
    schema = fresh_schema()
    async with Proxy(f"127.0.0.1:{shared_port()}") as proxy:
        urls = [shared_url(), f"postgresql://postgres@{proxy.target}/{database}"]
        async with heapline.sql.open(urls, schema=schema, poll_interval=0.1) as hl:
            for topic in (one, two):
                await hl.create_topic(topic)
            await hl.prepare_batch("b", "1", {one: [Outgoing(b"a")], two: [Outgoing(b"b")]})
            # As if the process had ended right after the decision: it is stored, and no shard has applied it.
            admin = await asyncpg.connect(urls[0], server_settings={"search_path": schema})
            await admin.execute("INSERT INTO decisions VALUES ('b', '{1}', 2, $1, NULL, NULL, clock_ms())", [one, two])
            await admin.close()
            await proxy.close()
            with pytest.raises(heapline.UnavailableError):
                await hl.commit_batch("b", ["1"])
            assert [m.payload for m in await hl.pop(one)] == [b"a"]  # the decision is final
            with pytest.raises(heapline.BatchDecided):
                await hl.abort_batch("b")
            await proxy.reopen()
            async with asyncio.timeout(30):  # no client repeats the commit: a sweep completes it
                while not (messages := await _pop_or_nothing(hl, two)):  # noqa: ASYNC110 - nothing reports it
                    await asyncio.sleep(0.05)
            assert [m.payload for m in messages] == [b"b"]
            assert await hl.commit_batch("b", ["1"]) == 2
            assert [await hl.pop(topic) for topic in (one, two)] == [[], []]


async def test_shard_that_is_down_stops_only_batches_with_parts_in_it(database: str) -> None:
    one, two = topics_by_shard(2)
    async with Proxy(f"127.0.0.1:{shared_port()}") as proxy:
        urls = [shared_url(), f"postgresql://postgres@{proxy.target}/{database}"]
        async with heapline.sql.open(urls, schema=fresh_schema(), poll_interval=0.1) as hl:
            for topic in (one, two):
                await hl.create_topic(topic)
            await hl.prepare_batch("here", "1", {one: [Outgoing(b"a")]})
            await hl.prepare_batch("here", "left out", {two: [Outgoing(b"x")]})
            await hl.prepare_batch("both", "1", {one: [Outgoing(b"b")], two: [Outgoing(b"c")]})
            await hl.prepare_batch("there", "1", {two: [Outgoing(b"d")]})
            await proxy.close()
            for batch in ("both", "there"):
                with pytest.raises(heapline.UnavailableError):
                    await hl.commit_batch(batch, ["1"])
            assert await hl.commit_batch("here", ["1"]) == 1
            assert [m.payload for m in await hl.pop(one, 10)] == [b"a"]
            assert await hl.commit_batch("here", ["1"]) == 1, "repeated"
            await proxy.reopen()
            async with asyncio.timeout(30):
                while not hl.node.shards[1].is_up:  # noqa: ASYNC110 - nothing reports it
                    await asyncio.sleep(0.05)
            with pytest.raises(heapline.UnknownPart):
                await hl.commit_batch("both", ["2"])
            assert [await hl.commit_batch(batch, ["1"]) for batch in ("both", "there")] == [2, 1]
            await hl._sweeper.sweep()
            assert sorted(m.payload for m in await hl.pop(two, 10)) == [b"c", b"d"]
            assert {info.state for info in await hl.list_batches()} == {"committed"}


async def test_sweep_completes_batches_although_another_shard_is_down(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = fresh_schema()
    admin = await asyncpg.connect(shared_url())
    await admin.execute(f"CREATE DATABASE {third} STRATEGY FILE_COPY")
    three = topics_by_shard(3)[2]
    async with Proxy(f"127.0.0.1:{shared_port()}") as proxy:
        urls = [shared_url(), f"postgresql://postgres@{proxy.target}/{database}", shared_url(third)]
        async with heapline.sql.open(urls, schema=fresh_schema()) as hl:
            await hl.create_topic(three)
            await hl.prepare_batch("b", "1", {three: [Outgoing(b"x")]})
            with monkeypatch.context() as patch:  # the node dies after the decision
                patch.setattr(batches, "_attach", None)
                with pytest.raises(TypeError):
                    await hl.commit_batch("b", ["1"])
            await proxy.close()
            with pytest.raises(heapline.UnavailableError):
                await hl._sweeper.sweep()
            assert [m.payload for m in await hl.pop(three)] == [b"x"]
    await admin.execute(f"DROP DATABASE {third} WITH (FORCE)")
    await admin.close()


async def test_sweep_completes_a_batch_however_many_newer_ones_are_undecided() -> None:
    schema = fresh_schema()
    async with heapline.sql.open([shared_url()], schema=schema) as hl:
        await hl.create_topic("jobs")
        await hl.prepare_batch("z", "1", {"jobs": [Outgoing(b"x")]})
        admin = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
        # As if the process had ended right after the decision, and others had prepared many batches since.
        await admin.execute("INSERT INTO decisions VALUES ('z', '{1}', 1, '{jobs}', NULL, NULL, clock_ms())")
        await admin.execute(
            "INSERT INTO prepared SELECT 'a' || n, part, topic, name, topics, digest, at + 1, 0, NULL, NULL, NULL, "
            "results, content FROM prepared, generate_series(1, 2000) AS n WHERE batch = 'z'"
        )
        await admin.close()
        await hl._sweeper.sweep()
        assert [m.payload for m in await hl.pop("jobs")] == [b"x"]


@pytest.mark.parametrize("ends", ["sweep", "forget_sink"])
async def test_decided_batch_is_completed_however_many_older_ones_are_undecided(ends: str) -> None:
    """Both end with decisions being forgotten: old ones, or those of the sink."""
    schema = fresh_schema()
    async with heapline.sql.open([shared_url()], schema=schema) as hl:
        await hl.create_topic("jobs")
        await hl.prepare_batch("z", "1", {"jobs": [Outgoing(b"x")]})
        admin = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})
        # As if the process had ended right after the decision, which is older than decisions are kept for a sweep.
        at = "clock_ms()" if ends == "forget_sink" else "0"
        await admin.execute(f"INSERT INTO decisions VALUES ('z', '{{1}}', 1, '{{jobs}}', 'sink', 1, {at})")
        await admin.execute(
            "INSERT INTO prepared SELECT 'a' || n, part, topic, name, topics, digest, at - 1, 0, NULL, NULL, NULL, "
            "results, content FROM prepared, generate_series(1, 2500) AS n WHERE batch = 'z'"
        )
        await admin.close()
        await (hl._sweeper.sweep() if ends == "sweep" else hl.forget_sink("sink"))
        assert [m.payload for m in await hl.pop("jobs")] == [b"x"]


async def test_batch_that_is_decided_while_its_sink_is_forgotten_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another node, which ends before it completes the batch."""
    schema = fresh_schema()
    sweep = batches.Sweeper.sweep
    async with heapline.sql.open([shared_url()], schema=schema) as hl:
        await hl.create_topic("jobs")
        await hl.prepare_batch("z", "1", {"jobs": [Outgoing(b"x")]})
        admin = await asyncpg.connect(shared_url(), server_settings={"search_path": schema})

        async def sweep_and_decide(self: Any) -> None:
            await sweep(self)
            await admin.execute("INSERT INTO decisions VALUES ('z', '{1}', 1, '{jobs}', 'sink', 1, clock_ms())")

        with monkeypatch.context() as patch:
            patch.setattr(batches.Sweeper, "sweep", sweep_and_decide)
            await hl.forget_sink("sink")
        await admin.close()
        await hl._sweeper.sweep()
        assert [m.payload for m in await hl.pop("jobs")] == [b"x"]


async def _pop_or_nothing(hl: heapline.Broker, topic: str) -> list[heapline.Message]:
    try:
        return await hl.pop(topic)
    except heapline.UnavailableError:
        return []


async def test_enqueues_over_shards_count_once_even_if_nodes_are_killed(tmp_path: Path, database: str) -> None:
    """Over MQueue's API, with idempotency keys: a producer repeats each request until it is answered."""
    one, two = topics_by_shard(2)
    schema, urls = fresh_schema(), (shared_url(), shared_url(database))
    rng, answered = random.Random(7), dict[int, list[int]]()

    async def produce(client: httpx.AsyncClient, number: int) -> None:
        items = [
            {"namespace": "default", "topic": t, "payload": b64(b"%d" % number), "idempotency_key": f"{t}.{number}"}
            for t in (one, two)
        ]
        while True:
            answer = await client.post("/enqueue", json=items)
            if answer.status_code == 200:
                answered[number] = answer.json()
                return
            assert answer.status_code in (409, 500, 503), answer.text  # in doubt, or part of the node is down
            await asyncio.sleep(0.05)

    number = 0
    async with sql_node(tmp_path / "a", schema, *urls) as first:
        key = admin_key(tmp_path / "a")
        node = first
        for round in range(2):
            async with http(node, key) as client:
                tasks = [asyncio.create_task(produce(client, number + i)) for i in range(20)]
                await asyncio.sleep(rng.uniform(0.05, 0.4))
                await node.kill()
                await asyncio.gather(*tasks, return_exceptions=True)
            node = sql_node(tmp_path / f"b{round}", schema, *urls)
            await node.__aenter__()
            async with http(node, key) as client:  # unanswered calls are repeated
                missing = [n for n in range(number, number + 20) if n not in answered]
                async with asyncio.timeout(60):
                    await asyncio.gather(*(produce(client, n) for n in missing))
            number += 20
        async with heapline.connect(node.target, api_key=key) as hl:
            for index, topic in enumerate((one, two)):
                found = await hl.pop(topic, 1000)
                assert Counter(m.id for m in found) == Counter(ids[index] for ids in answered.values())
                assert sorted(int(m.payload) for m in found) == list(range(number))
        assert await node.terminate() == 0
        assert b"Traceback" not in node.logged()


async def test_prepare_that_arrives_after_the_commit_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused node has checked that the batch is undecided; the client repeats the call elsewhere and commits."""
    check, paused, resumed = batches._refuse_late, asyncio.Event(), asyncio.Event()

    async def pause_once(*args: Any) -> None:
        await check(*args)
        if not paused.is_set():
            paused.set()
            await resumed.wait()

    monkeypatch.setattr(batches, "_refuse_late", pause_once)
    async with heapline.sql.open([shared_url()], schema=fresh_schema()) as hl:
        await hl.create_topic("jobs")
        share = {"jobs": [Outgoing(b"x")]}
        late = asyncio.create_task(hl.prepare_batch("b", "1", share))
        await paused.wait()
        await hl.prepare_batch("b", "1", share)
        assert await hl.commit_batch("b", ["1"]) == 1
        resumed.set()
        with pytest.raises(heapline.BatchDecided):
            await late
        await hl._sweeper.sweep()
        assert await hl.commit_batch("b", ["1"]) == 1
        assert (await hl.stats("jobs")).ready == 1
        await hl.do(ForgetBatch("b"))
        await hl.prepare_batch("b", "1", share)  # another batch with the same name


async def test_commit_does_not_wait_for_other_shards_while_it_locks_the_rings(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = topics_by_shard(2)
    view, turned = prepared.view, 0
    async with heapline.sql.open([shared_url(), shared_url(database)], schema=fresh_schema()) as hl:

        async def turn_meanwhile(connection: Any, batch: str) -> Any:
            async def work(connection: Any) -> None:
                nonlocal turned
                turned += 1

            await hl.node.shards[0].run_alone(work)  # raises if the commit has the rings' lock
            return await view(connection, batch)

        for topic in (one, two):
            await hl.create_topic(topic)
        await hl.prepare_batch("b", "1", {one: [Outgoing(b"a")], two: [Outgoing(b"b")]})
        for timekeeper in hl.node.timekeepers:
            await timekeeper.close()
        monkeypatch.setattr(prepared, "view", turn_meanwhile)
        assert await hl.commit_batch("b", ["1"]) == 2
        assert turned == 2
