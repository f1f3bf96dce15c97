"""Calls that are audited, and the limit on lines about refusals."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heapline.clock import SystemClock
from heapline.contract.call import BY_RPC
from heapline.contract.errors import (
    ConfirmationNeeded,
    PermissionDenied,
    ResourceExhausted,
    TopicNotFound,
    Unauthenticated,
)
from heapline.server import audit
from heapline.server.audit import Audit, AuditLog
from heapline.server.auth.principals import LOCAL, NoAuthGuard
from heapline.server.gate import Gate, Request
from heapline.testing.clock import FakeClock


class Rig:
    def __init__(self, directory: Path) -> None:
        self.directory, self.clock = directory, FakeClock()
        self.log = AuditLog(str(directory), SystemClock())
        self.auditing = Audit(self.log, self.clock)
        self.gate = Gate(NoAuthGuard(), [self.auditing])

    def end(self, call: str, error: BaseException | None = None, known: bool = True, **reported: Any) -> None:
        request = Request(self.gate, "http", call, {"x-correlation-id": "c-1"}, topic="jobs")
        if known:
            request.caller = LOCAL
        for name, value in reported.items():
            setattr(request, name, value)
        self.auditing.end(request, error)

    async def lines(self) -> list[dict[str, Any]]:
        await self.auditing.close()
        file = self.directory / "audit.jsonl"
        return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()] if file.exists() else []


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_administrative_calls_are_audited_and_data_calls_are_not(rig: Rig) -> None:
    for call in BY_RPC:
        rig.end(call)
    calls = [line["call"] for line in await rig.lines()]
    assert len(calls) == len(set(calls))
    assert {
        "MakeHeap", "UpdateHeapConfig", "DeleteHeap", "Purge", "Pause", "Resume", "SetPartitionThrottled", "Snapshot",
        "RecordAudit",
        "DlqReplay", "DlqDelete", "CreateGroup", "DeleteGroup", "ResetOffsets", "GroupDeadReplay", "GroupDeadDelete",
        "CreateKey", "RevokeKey", "CreateUser", "UpdateUser", "DisableUser", "CreateLoginLink", "EndLeases",
        "CreateSchedule", "PauseSchedule", "ResumeSchedule", "DeleteSchedule",
        "StartReplay", "CancelReplay", "ForgetBatch", "ForgetSink",
    } == set(calls)  # fmt: skip


async def test_audit_line_has_caller_call_topic_count_and_outcome(rig: Rig) -> None:
    rig.end("Purge", count=7)
    rig.end("DeleteHeap", TopicNotFound("jobs"))
    done, failed = await rig.lines()
    del done["at"]
    assert done == {
        "who": "local", "call": "Purge", "topic": "jobs", "about": "", "outcome": "ok", "count": 7,
        "correlation_id": "c-1",
    }  # fmt: skip
    assert failed["outcome"] == "TopicNotFound"


@pytest.mark.parametrize(
    "error",
    [Unauthenticated("no"), PermissionDenied("local", "admin", "jobs"), ConfirmationNeeded("Purge", "jobs", "tok-en")],
)
async def test_refusal_of_any_call_is_audited_without_its_token(rig: Rig, error: Exception) -> None:
    rig.end("Enqueue", error, known=False)
    (line,) = await rig.lines()
    assert (line["call"], line["who"], line["outcome"]) == ("Enqueue", "unknown", type(error).__name__)
    assert "tok-en" not in str(line)


async def test_ordinary_error_of_a_data_call_is_not_audited(rig: Rig) -> None:
    rig.end("Enqueue", TopicNotFound("jobs"))
    assert await rig.lines() == []


async def test_throttled_unauthenticated_call_is_audited_and_a_limited_caller_is_not(rig: Rig) -> None:
    rig.end("Enqueue", ResourceExhausted("attempts", 10), known=False)
    rig.end("Enqueue", ResourceExhausted("calls under way", 10))
    assert [(line["who"], line["outcome"]) for line in await rig.lines()] == [("unknown", "ResourceExhausted")]


async def test_flood_of_refusals_is_bounded_counted_and_hides_no_administrative_call(rig: Rig) -> None:
    for _ in range(10_000):
        rig.end("Enqueue", Unauthenticated("no"), known=False)
    rig.end("Purge")
    rig.clock.advance(1)
    for _ in range(1000):
        rig.end("Pop", Unauthenticated("no"), known=False)
    lines = await rig.lines()
    assert [line["call"] for line in lines] == [
        *["Enqueue"] * 100, "Refusals", "Purge", *["Pop"] * 10, "Refusals"
    ]  # fmt: skip
    assert [line["count"] for line in lines if line["call"] == "Refusals"] == [9900, 990]


async def test_slow_audit_disk_does_not_block_calls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "QUEUED_MAX", 10)
    stuck, go = Rig(rig.directory), threading.Event()
    write = stuck.log.write

    def slow(*line: Any, **facts: Any) -> None:
        go.wait(10)
        write(*line, **facts)

    monkeypatch.setattr(stuck.log, "write", slow)
    for _ in range(100):
        stuck.end("Purge")  # returns immediately, or this test takes 1000 seconds
    assert 89 <= stuck.auditing.lost <= 90  # the thread may have one in progress
    go.set()
    assert len(await stuck.lines()) == 100 - stuck.auditing.lost


async def test_login_is_audited_whether_it_succeeds_or_not(rig: Rig) -> None:
    rig.auditing.logged_in("user:ann@example.org", None)
    rig.auditing.logged_in("user:ann@example.org", Unauthenticated("no"))
    assert [(line["who"], line["about"], line["outcome"]) for line in await rig.lines()] == [
        ("user:ann@example.org", "ann@example.org", "ok"),
        ("unknown", "ann@example.org", "Unauthenticated"),
    ]
