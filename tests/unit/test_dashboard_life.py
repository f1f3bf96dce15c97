"""A message's life on a page that stays open: the journal is not read again each time the message changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from heapline.contract.inspection import MessageEvent, MessageLife
from heapline.contract.message import MessageInfo
from heapline.dashboard import message_life
from heapline.dashboard.caller import Memory
from heapline.dashboard.message_life import READ_SHARE, life_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOOK = 2.0


class Reader:
    """A caller whose readings of the journal take TOOK seconds of the test's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.reads, self.now = Memory(), 0, 100.0
        monkeypatch.setattr(message_life.time, "monotonic", lambda: self.now)

    async def do(self, command: Any) -> MessageLife:
        self.reads += 1
        self.now += TOOK
        events = [MessageEvent(kind="leased", at=NOW, attempts=self.reads)]
        return MessageLife(items=events, is_complete=True, known_since=NOW, read_until=NOW)


async def test_lease_that_is_extended_all_the_time_reads_the_journal_for_a_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader(monkeypatch)
    info = MessageInfo(id=1, topic="jobs", partition=0, state="leased", attempts=1, deadline=NOW)
    seconds = 300
    end = reader.now + seconds
    while reader.now < end:
        info = msgspec.structs.replace(info, deadline=info.deadline + timedelta(seconds=1))
        await life_of(reader, info, None)  # type: ignore[arg-type]
        reader.now += 0.5
    assert reader.reads * TOOK <= seconds / READ_SHARE + TOOK
    assert reader.reads > 5


async def test_other_message_and_other_part_of_a_life_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch)
    info = MessageInfo(id=1, topic="jobs", partition=0, state="leased", attempts=1, deadline=NOW, id_suffix=7)
    await life_of(reader, info, None)  # type: ignore[arg-type]
    await life_of(reader, info, "more")  # type: ignore[arg-type]
    await life_of(reader, msgspec.structs.replace(info, id_suffix=8), None)  # type: ignore[arg-type]
    assert reader.reads == 3
    await life_of(reader, info, None)  # type: ignore[arg-type]
    await life_of(reader, info, "more")  # type: ignore[arg-type]
    assert reader.reads == 3
