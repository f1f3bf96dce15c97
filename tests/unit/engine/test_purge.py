"""A purge of what was counted, while messages arrive: it removes a part of the waiting messages, in pieces."""

from __future__ import annotations

import pytest

from heapline import Outgoing
from tests.unit.engine.rig import opened


async def test_purge_of_a_part_in_pieces_is_the_same_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.engine.topic_calls.PURGE_ROWS", 4)
    async with opened() as rig:
        await rig.hl.enqueue_batch("jobs", [Outgoing(b"old")] * 10)
        await rig.hl.enqueue("jobs", b"old", delay=60)
        rig.clock.advance(1)
        counted = await rig.hl.purge_count("jobs")
        rig.clock.advance(1)
        await rig.hl.enqueue("jobs", b"new")
        await rig.hl.enqueue("jobs", b"new", delay=60)
        assert await rig.hl.purge("jobs", enqueued_before=counted.as_of) == counted.count == 11
        for _ in range(2):
            stats = await rig.hl.stats("jobs")
            assert (stats.ready, stats.delayed) == (1, 1)
            await rig.reopen()
        assert [message.payload for message in await rig.hl.pop("jobs", 20)] == [b"new"]
