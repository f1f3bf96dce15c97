"""A message's history where the journal's older part was reclaimed, and how much of it one call reads."""

from __future__ import annotations

import pytest

from heapline.contract.errors import BadRequest, MessageNotFound
from heapline.engine import history
from tests.unit.engine.rig import opened
from tests.unit.engine.test_maintenance import churn, reclaim


async def test_reclaimed_part_is_said_and_the_rest_is_shown() -> None:
    async with opened(topic={"streams": False}) as rig:
        (long, *_) = [(await rig.hl.enqueue("jobs", b"long", priority=50)).id]
        gone = (await rig.hl.enqueue("jobs", b"gone", priority=-500)).id
        await rig.hl.ack(await rig.hl.pop("jobs"))
        begun = rig.clock.wall_ms()
        for _ in range(3):
            rig.clock.advance(60)
            await churn(rig)
            await reclaim(rig)
        assert rig.runner().maintenance.segments_reclaimed_total
        await rig.hl.ack(await rig.hl.pop("jobs"))
        found = await rig.hl.message_history("jobs", long)
        assert not found.is_complete
        assert [event.kind for event in found.items][-2:] == ["leased", "acked"]
        assert found.known_since is not None
        assert found.known_since.timestamp() * 1000 > begun
        left = await rig.hl.message_history("jobs", gone)  # it is known that it was acked, and not more
        assert (left.items, left.is_complete) == ([], False)
        with pytest.raises(MessageNotFound):
            await rig.hl.message_history("jobs", long - 5)


async def test_call_reads_a_bounded_part_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "JOB_BYTES", 100_000)
    monkeypatch.setattr(history, "CALL_BYTES", 300_000)
    async with opened() as rig:
        id = (await rig.hl.enqueue("jobs", b"x", priority=50)).id
        await churn(rig, 40)
        await rig.hl.pop("jobs")
        page = await rig.hl.message_history("jobs", id)
        assert [event.kind for event in page.items] == ["enqueued"]
        calls = 1
        kinds = []
        while page.cursor is not None:
            before = page.read_until
            page = await rig.hl.message_history("jobs", id, cursor=page.cursor)
            assert page.is_complete
            assert page.read_until >= before
            kinds += [event.kind for event in page.items]
            calls += 1
        assert kinds == ["leased"]
        assert calls > 3
        assert rig.io.ran["step"] >= calls


async def test_cursor_of_another_message_or_a_forged_one_is_harmless() -> None:
    async with opened() as rig:
        first, second = [(await rig.hl.enqueue("jobs", b"x")).id for _ in range(2)]
        page = await rig.hl.message_history("jobs", first, 1)
        assert page.cursor is not None
        other = await rig.hl.message_history("jobs", second, 1, page.cursor)
        assert [event.kind for event in other.items] == ["enqueued"]
        for forged in ("gA", "kwEC", page.cursor[:-4]):
            with pytest.raises(BadRequest, match="cursor"):
                await rig.hl.message_history("jobs", first, 1, forged)
