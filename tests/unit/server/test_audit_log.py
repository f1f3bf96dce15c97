"""The audit log records caller, call, target, time and outcome, and never a secret."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest
from heapline.server.audit import AuditLog
from heapline.server.auth import redact
from heapline.server.auth.secret import new_key
from heapline.testing.clock import FakeClock


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_line_has_caller_call_topic_time_and_outcome(tmp_path: Path) -> None:
    clock = FakeClock()
    AuditLog(str(tmp_path), clock).write(
        "key:0011", "purge", topic="jobs", outcome="PermissionDenied", count=3, correlation_id="c-1"
    )
    assert lines(tmp_path / "audit.jsonl") == [
        {
            "at": clock.wall_ms(), "who": "key:0011", "call": "purge", "topic": "jobs", "about": "",
            "outcome": "PermissionDenied", "count": 3, "correlation_id": "c-1",
        }
    ]  # fmt: skip
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl"


def test_secrets_fed_to_every_field_are_not_in_the_file(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path), FakeClock())
    key_id, key = new_key()
    pem = "-----BEGIN PRIVATE KEY-----\nMIGHAgEA\n-----END PRIVATE KEY-----"
    for secret in (key.reveal(), f"Bearer {key.reveal()}", JWT, f"Bearer {JWT}", "Basic YWRhOnB3", pem):
        for text in (secret, f"x {secret} y", "x" * 250 + " " + secret):
            audit.write(text, text, topic=text, about=text, outcome=text, correlation_id=text)
    written = (tmp_path / "audit.jsonl").read_text(encoding="utf-8")
    secret_part = key.reveal().split("_", 2)[2]
    for hidden in (secret_part, secret_part[:6], "c2lnbmF0dXJl", "eyJzdWIi", "YWRhOnB3", "MIGHAgEA"):
        assert hidden not in written
    assert key_id in written  # the public part is allowed, and helps


@given(st.text(max_size=30), st.text(max_size=30))
def test_key_is_redacted_in_any_text(before: str, after: str) -> None:
    key = new_key()[1].reveal()
    assert key.split("_", 2)[2][:20] not in redact(f"{before}{key}{after}")


def test_line_breaks_in_names_make_no_second_line(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path), FakeClock())
    audit.write("key:1", "pop", topic='a\n{"who":"local"}', correlation_id="b\r\n\u2028c" + "d" * 10_000)
    assert (tmp_path / "audit.jsonl").read_bytes().count(b"\n") == 1
    assert (tmp_path / "audit.jsonl").stat().st_size < 1000


def test_file_is_rotated_by_size_and_a_number_of_files_kept(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path), FakeClock(), bytes_max=500, kept=2)
    for n in range(40):
        audit.write("local", "call", count=n)
    files = [tmp_path / name for name in ("audit.jsonl.2", "audit.jsonl.1", "audit.jsonl")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files)
    counts = [line["count"] for path in files for line in lines(path)]
    assert counts == list(range(counts[0], 40))
    assert all(path.stat().st_size < 700 for path in files)
    assert audit.lost == 0


def test_concurrent_writers_lose_no_line(tmp_path: Path) -> None:
    def work(name: str) -> None:
        audit = AuditLog(str(tmp_path), FakeClock(), bytes_max=2000, kept=1000)
        for n in range(50):
            audit.write(name, "call", count=n)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [(line["who"], line["count"]) for path in tmp_path.iterdir() for line in lines(path)]
    assert sorted(written) == sorted((str(a), b) for a in range(4) for b in range(50))


def test_line_that_cannot_be_written_is_counted_and_blocks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit = AuditLog(str(tmp_path / "absent"), FakeClock())
    audit.write("key:1", "purge", topic="secret-topic")
    assert audit.lost == 1
    assert "audit line not written" in caplog.text
    assert "secret-topic" not in caplog.text


def test_audit_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    os.symlink(tmp_path / "elsewhere", tmp_path / "audit.jsonl")
    audit = AuditLog(str(tmp_path), FakeClock())
    audit.write("key:1", "purge")
    assert (audit.lost, (tmp_path / "elsewhere").read_text()) == (1, "")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_all(audit: AuditLog, limit: int) -> list[str]:
    """Return who made each call, page by page."""
    page, found = audit.read(limit), []
    while True:
        assert len(page.items) <= limit
        found += [line.who for line in page.items]
        if page.cursor is None:
            return found
        page = audit.read(limit, page.cursor)


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_lines_are_read_newest_first_across_rotated_files(tmp_path: Path, limit: int) -> None:
    audit = AuditLog(str(tmp_path), FakeClock(), bytes_max=1000, kept=5)
    for number in range(40):
        audit.write(f"key:{number}", "purge")
    assert (tmp_path / "audit.jsonl.3").exists()
    assert read_all(audit, limit) == [f"key:{number}" for number in reversed(range(40))]


def test_cursor_stays_valid_when_files_are_rotated(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path), FakeClock(), bytes_max=1000)
    for number in range(20):
        audit.write(f"key:{number}", "purge")
    page = audit.read(5)
    for _ in range(10):
        audit.write("later", "purge")
    assert [line.who for line in audit.read(5, page.cursor).items] == [f"key:{n}" for n in (14, 13, 12, 11, 10)]


def test_page_is_bounded_in_bytes_and_skips_damaged_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.server.audit.READ_BYTES_MAX", 700)
    audit = AuditLog(str(tmp_path), FakeClock())
    for number in range(30):
        audit.write(f"key:{number}", "purge")
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"at": 17, "who": "ke')
    assert 0 < len(audit.read(1000).items) < 10
    assert read_all(audit, 1000) == [f"key:{number}" for number in reversed(range(30))]


@pytest.mark.parametrize("cursor", ["x", "1", "1-x", "-5", "1-2-3", "9" * 50])
def test_invalid_cursor_is_rejected(tmp_path: Path, cursor: str) -> None:
    with pytest.raises(BadRequest, match="cursor is not valid"):
        AuditLog(str(tmp_path), FakeClock()).read(10, cursor)
