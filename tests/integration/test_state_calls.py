"""The waiting messages of a topic, read through a server: pinned, equal to the directory's, for consumers only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

import numpy as np  # noqa: E402

from heapline.client.transports.blocking_calls import BlockingCalls  # noqa: E402
from heapline.contract import log  # noqa: E402
from heapline.contract.columns import pack  # noqa: E402
from heapline.contract.errors import BadRequest, PermissionDenied, TopicNotFound  # noqa: E402
from heapline.contract.message import DlqFilter  # noqa: E402
from heapline.contract.topics import CreateTopic  # noqa: E402
from heapline.spark.directory import DirectorySource  # noqa: E402
from heapline.spark.options import ReadOptions, parse_options  # noqa: E402
from heapline.spark.schema import arrow_schema  # noqa: E402
from heapline.spark.topic_log import Source  # noqa: E402
from heapline.spark.views.state import StateTask, plan_state, read_state  # noqa: E402
from tests.integration.server_rig import Keys, Rig  # noqa: E402
from tests.integration.test_log_units import filled, remote  # noqa: E402


def asked_for(view: str, **options: str) -> ReadOptions:
    given = {"path": "-", "subscribe": "jobs", "view": view, "includeHeaders": "true", **options}
    return parse_options(given, streaming=False)


def shown(source: Source, work: list[StateTask], asked: ReadOptions) -> Any:
    batches = [batch for piece in work for batch in read_state(source, piece, asked)]
    return pa.Table.from_batches(batches, arrow_schema(asked.columns)).sort_by("id")


@pytest.mark.parametrize("view", ["backlog", "dlq"])
async def test_server_pins_the_state_it_returns_while_the_queue_changes(tmp_path: Path, view: str) -> None:
    async with Rig(tmp_path) as rig:
        await filled(rig)
        for message in await rig.broker.pop("jobs", 40, holder="w"):
            if view == "dlq":
                await message.bury("kaputt")
        far, near, asked = remote(rig), DirectorySource(str(rig.directory)), asked_for(view, minPartitions="2")
        work = await asyncio.to_thread(plan_state, far, asked)
        assert len(work) == 2
        before = await asyncio.to_thread(shown, far, work, asked)
        assert before.num_rows == (40 if view == "dlq" else 30 * 33)
        there = await asyncio.to_thread(plan_state, near, asked)
        same = [name for name in before.column_names if name != "as_of"]
        assert before.select(same).equals(shown(near, there, asked).select(same))
        await rig.broker.ack(await rig.broker.pop("jobs", 2000, max_bytes=1 << 25))
        if view == "dlq":
            await rig.broker.dlq_delete("jobs", where=DlqFilter())
        for _ in range(2):
            await rig.broker.enqueue("jobs", b"more")
            await rig.broker.snapshot("jobs")
        assert (await asyncio.to_thread(shown, far, work, asked)).equals(before)
        assert list(tmp_path.rglob("*.lease"))  # the plans' own pins


async def test_state_requires_the_consume_right_and_a_valid_request(tmp_path: Path) -> None:
    keys = Keys(admin="*:produce,consume,admin", reader="jobs:consume", writer="jobs:produce")
    async with Rig(tmp_path, keys) as rig:
        calls = {name: BlockingCalls([rig.target], name) for name in ("admin", "reader", "writer")}
        await asyncio.to_thread(calls["admin"].do, CreateTopic("jobs"))

        def pin(name: str, topic: str = "jobs") -> Any:
            return list(calls[name].stream(lambda: log.PinState(topic)))

        def records(positions: bytes, incarnation: int | None = None) -> Any:
            reported = at.incarnation if incarnation is None else incarnation
            return calls["reader"].do(log.ReadRecords("jobs", reported, memoryview(positions)))

        (at,) = await asyncio.to_thread(pin, "reader")
        assert (at.count, at.rows) == (0, b"")
        with pytest.raises(PermissionDenied):
            await asyncio.to_thread(pin, "writer")
        with pytest.raises(TopicNotFound):
            await asyncio.to_thread(pin, "admin", "nothing")
        for positions, reported in (
            (b"123", "8 bytes for each record"),
            (pack([-1]), "negative"),
            (pack(range(20_000)), "fewer"),
        ):
            with pytest.raises(BadRequest, match=reported):
                await asyncio.to_thread(records, positions)
        with pytest.raises(BadRequest, match="created again"):
            await asyncio.to_thread(records, pack([1]), 99)
        nowhere = await asyncio.to_thread(records, pack([1, 1 << 40, (1 << 62) + 7]))
        assert np.frombuffer(nowhere.bad, dtype=np.int64).tolist() == [0, 1, 2]
        assert (nowhere.payloads, nowhere.smalls) == (b"", b"")
