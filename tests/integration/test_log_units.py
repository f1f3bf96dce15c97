"""The log read through a server as raw units: the same rows as from the directory, even if the
server is restarted meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

pa = pytest.importorskip("pyarrow")

from heapline.client.transports.blocking_calls import BlockingCalls  # noqa: E402
from heapline.contract.errors import BadName, BadRequest, JournalCorrupt, PermissionDenied, Unauthenticated  # noqa: E402
from heapline.contract.log import GetLogIndex, Hold, ReadUnits  # noqa: E402
from heapline.contract.message import Outgoing  # noqa: E402
from heapline.contract.topics import CreateTopic  # noqa: E402
from heapline.spark.directory import DirectorySource  # noqa: E402
from heapline.spark.options import parse_options  # noqa: E402
from heapline.spark.read_plan import (  # noqa: E402
    StreamPlan,
    plan_batch,
    read,
)
from heapline.spark.remote import RemoteSource, _Checked  # noqa: E402
from heapline.spark.schema import arrow_schema  # noqa: E402
from heapline.spark.topic_log import DataLost, Source  # noqa: E402
from tests.integration.server_rig import Keys, Rig  # noqa: E402


async def filled(rig: Rig, **config: Any) -> None:
    config = {"partitions": 3, "segment_bytes": 1 << 20, "max_payload_bytes": 1 << 18, **config}
    await rig.broker.create_topic("jobs", **config)
    for i in range(30):
        batch = [Outgoing(b"%d" % j * 500, j, key=f"k{j}", headers={"n": str(i)}) for j in range(60)]
        await rig.broker.enqueue_batch("jobs", batch)
        await rig.broker.ack(await rig.broker.pop("jobs", 30))
        await rig.broker.prepare_batch(f"b{i}", "p", batch[:3], topic="jobs")
        await rig.broker.commit_batch(f"b{i}", ["p"])


def remote(rig: Rig, credential: str | None = None) -> RemoteSource:
    return RemoteSource((rig.target,), credential)


def table(source: Source, **options: str) -> Any:
    asked = parse_options({"path": "-", "subscribe": "jobs", "includeHeaders": "true", **options}, streaming=False)
    work = plan_batch(source, asked)
    batches = [batch for piece in work for batch in read(source, piece, asked)]
    found = pa.Table.from_batches(batches, arrow_schema(asked.columns))
    return found.sort_by([("partition", "ascending"), ("offset", "ascending")])


@pytest.mark.parametrize("view", ["messages", "events"])
async def test_server_returns_the_rows_of_its_directory(tmp_path: Path, view: str) -> None:
    async with Rig(tmp_path) as rig:
        await filled(rig)
        asked = {"view": view, "maxPartitionBytes": "200000"}
        far = await asyncio.to_thread(table, remote(rig), **asked)
        near = await asyncio.to_thread(table, DirectorySource(str(rig.directory)), **asked)
        assert far.num_rows > 1800
        assert far.equals(near)
        time = str(int(near["timestamp"][near.num_rows // 2].as_py().timestamp() * 1000))
        later = {**asked, "startingTimestamp": time, "startingOffsetsByTimestampStrategy": "latest"}
        far = await asyncio.to_thread(table, remote(rig), **later)
        assert far.equals(await asyncio.to_thread(table, DirectorySource(str(rig.directory)), **later))


async def test_stream_through_a_server_returns_every_message_once(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await filled(rig)
        options = parse_options({"path": "-", "subscribe": "jobs", "startingOffsets": "earliest"}, streaming=True)
        source = remote(rig)
        following = await asyncio.to_thread(StreamPlan, source, options)
        at, seen = await asyncio.to_thread(following.first), []
        for number in range(4):
            await rig.broker.enqueue("jobs", b"%d" % number)
            await asyncio.sleep(0.06)  # it polls the server no more often
            end = await asyncio.to_thread(following.next_end, at, 800, True, 0.0)
            work = await asyncio.to_thread(following.plan, at, end)
            for piece in work:
                for batch in await asyncio.to_thread(lambda w: list(read(source, w, options)), piece):
                    seen += batch["id"].to_pylist()
            at = end
        assert len(seen) == len(set(seen)) > 1500
        leases = list(tmp_path.rglob("*.lease"))
        assert len(leases) == 1  # of the stream; those of its tasks have ended
        await asyncio.to_thread(following.close)
        assert not list(tmp_path.rglob("*.lease"))


async def test_read_continues_after_a_server_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.start()
    await filled(rig)
    source = remote(rig)
    log = source.open((await asyncio.to_thread(source.topics))[0])
    await asyncio.to_thread(log.refresh)
    units = log.units(None, log.last_unit() + 1)
    found = [await asyncio.to_thread(next, units)]
    port = rig.server.port
    await rig.stop()
    again = Rig(tmp_path, port=port)
    rest = asyncio.create_task(asyncio.to_thread(list, units))
    await asyncio.sleep(0.1)
    await again.start()
    found += await rest
    assert [unit.number for unit in found] == list(range(1, log.last_unit() + 1))
    await again.stop()


async def test_reader_needs_the_right_to_consume(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", reader="jobs:consume", writer="jobs:produce")
    async with Rig(tmp_path, keys) as rig:
        admin = BlockingCalls([rig.target], "admin")
        await asyncio.to_thread(admin.do, CreateTopic("jobs"))
        assert (await asyncio.to_thread(table, remote(rig, "reader"))).num_rows == 0
        with pytest.raises(PermissionDenied):
            await asyncio.to_thread(table, remote(rig, "writer"))
        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(table, remote(rig, "nobody"))


async def test_malformed_reads_are_rejected_and_deleted_units_reported(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await filled(rig)
        calls = BlockingCalls([rig.target], None)
        for hold in (Hold("x", 1, 1e9), Hold("../x", 1, 1), Hold("x" * 250, 1, 1), Hold("x" * 250, 1, 0)):
            with pytest.raises((BadName, BadRequest)):
                await asyncio.to_thread(calls.do, GetLogIndex("jobs", hold=hold))
        log = remote(rig).open((await asyncio.to_thread(remote(rig).topics))[0])
        with pytest.raises(JournalCorrupt, match="did not send unit"):
            await asyncio.to_thread(list, log.units(None, 10_000))
        await rig.broker.delete_topic("jobs")
        await rig.broker.create_topic("jobs")
        with pytest.raises(DataLost, match="created again"):
            await asyncio.to_thread(log.refresh)


async def test_changed_bytes_are_detected(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        await filled(rig)
        calls = BlockingCalls([rig.target], None)
        ref = (await asyncio.to_thread(remote(rig).topics))[0]
        answers = await asyncio.to_thread(list, calls.stream(lambda: ReadUnits("jobs", 1, 4)))
        first, second, third = [raw for answer in answers for raw in answer.units]
        checked = _Checked(ref, 1)
        checked.next(first)
        with pytest.raises(JournalCorrupt, match="expected unit 2"):
            checked.next(third)
        damaged = second.data[:200] + bytes([second.data[200] ^ 1]) + second.data[201:]
        with pytest.raises(JournalCorrupt, match="does not match its checksum"):
            checked.next(msgspec.structs.replace(second, data=damaged))
