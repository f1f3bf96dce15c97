"""A server under load is killed with SIGKILL repeatedly; its clients continue with the next one.

After every kill the journals are verified unchanged. At the end the whole log is read over the wire and checked
against the clients' own record: answered calls are in it, once, each lease was granted to the client in the log, and no
acked message was redelivered. Then the rest is popped: every answered message is accounted for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from heapline.cli.main import app
from heapline.client.transports.native import NativeBroker
from heapline.contract.broker import Broker
from tests.integration.raw_grpc import RawGrpc
from tests.integration.server_audit import BatchAudit, audit_topics, check_record, lives
from tests.integration.server_load import TOPICS, Load, Record, make_topics
from tests.integration.server_process import Process

BROKER = {"snapshot_bytes": 1 << 18, "snapshot_interval": 0.4, "reclaim_interval": 0.1, "spare_segment_bytes": 1 << 20}


def verify(data: Path) -> None:
    verdict = CliRunner().invoke(app, ["journal", "verify", str(data)])
    assert verdict.exit_code == 0, verdict.output


async def drain(broker: Broker, record: Record) -> None:
    """Pop and ack everything, as a worker would at the end."""
    for topic in TOPICS:
        while True:
            await broker.dlq_replay(topic)
            popped = await broker.pop(topic, 1000, visibility=60.0, wait=0.3, holder="drain")
            stats = await broker.stats(topic)
            if not popped and not (stats.ready or stats.delayed or stats.leased or stats.dead):
                break
            record.popped(popped, "drain")
            record.ack_asked.update((topic, m.id) for m in popped)
            await broker.ack(popped)
    lost = [tag for tag, place in record.ids.items() if place not in record.ack_asked]
    assert not lost, f"answered and never seen again: {lost[:5]}"


async def play(place: Path, kills: int, seed: int) -> tuple[Load, dict[str, list[BatchAudit]]]:
    print(f"seed {seed}")
    draw, load, data = random.Random(seed), Load(seed), place / "data"
    config = place / "server.yaml"
    config.write_text(yaml.safe_dump({"broker": BROKER}))
    server = Process(data, "--insecure-everybody", "--config", str(config))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(server)
        for turn in range(kills + 1):
            if turn and draw.random() < 0.2:  # killed while it opens
                await server.spawn()
                await asyncio.sleep(draw.uniform(0.1, 1.2))
                await server.kill()
                verify(data)
            await server.__aenter__()
            broker = await stack.enter_async_context(NativeBroker(server.target))
            streams = await stack.enter_async_context(RawGrpc(server.grpc_target))
            if turn == 0:
                await make_topics(broker)
                load.start()
                stack.push_async_callback(load.abandon)
            load.link.point_to(broker, streams)
            await asyncio.sleep(draw.choice([0.1, 0.5, 1.0]) + draw.uniform(0, 0.5))
            load.check_alive()
            if turn < kills:
                load.link.point_to(None)
                await server.kill()
                verify(data)
        await load.stop()
        audits = await audit_topics(broker)
        check_record(load.record, audits)
        async with asyncio.timeout(60):
            await drain(broker, load.record)
        audits = await audit_topics(broker)
        check_record(load.record, audits)
        assert not +lives(audits), "everything was popped and acked, but the log has messages left"
    assert b"Traceback" not in server.logged()
    print(f"{kills} kills, {len(load.link.refusals)} calls cut off; {dict(load.record.counts)}")
    for what in ("enqueued", "delivered", "ack", "repeats refused", "batches committed"):
        assert load.record.counts[what], f"there was no {what}: the load is incomplete"
    return load, audits


@pytest.mark.slow
async def test_server_killed_repeatedly_keeps_every_acknowledged_call(tmp_path: Path) -> None:
    load, audits = await play(tmp_path, kills=3, seed=2026)
    assert load.link.refusals, "no kill hit a call"
    check_that_losses_would_be_seen(load.record, audits)


def check_that_losses_would_be_seen(record: Record, audits: dict[str, list[BatchAudit]]) -> None:
    """Fail for the record against a log from which something is missing."""
    how, topic, id, token = next(end for end in record.ended if end[0] == "ack")
    (part,) = [audit for audit in audits[topic] if id in audit.tags]
    part.happened.remove((how, id, token))
    with pytest.raises(AssertionError, match="answered, but not in the log"):
        check_record(record, audits)
    tag = part.tags.pop(id)
    with pytest.raises(AssertionError, match=r"of one call are there|answered and not in the log"):
        check_record(record, audits)
    part.tags |= {id: tag, id + 1: tag}
    with pytest.raises(AssertionError, match="more than once"):
        check_record(record, audits)


@pytest.mark.soak
@pytest.mark.parametrize("round", range(10))
async def test_server_killed_a_hundred_times_keeps_every_acknowledged_call(tmp_path: Path, round: int) -> None:
    await play(tmp_path, kills=12, seed=random.SystemRandom().randrange(1 << 31))
