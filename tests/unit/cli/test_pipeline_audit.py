"""`heapline pipeline audit`: where its result is kept, and what happens if it cannot be; no Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from heapline.cli.main import app
from heapline.cli.pipeline import job as preflight
from heapline.contract.errors import HeaplineError, PermissionDenied, UnavailableError, Unsupported
from heapline.contract.topics import RecordAudit
from heapline.spark.audit import job
from heapline.spark.audit.report import PROMISES, PROVED, REFUTED, AuditResult, Check

WRONG = {"none_lost": 1, "one_holder": 2, "stays_over": 4, "not_early": 8, "rank": 16}


class Server:
    """The server's side: keeps what is recorded, or refuses it."""

    def __init__(self) -> None:
        self.kept: list[RecordAudit] = []
        self.refusal: HeaplineError | None = None

    def record_audit(self, topic: str, until: datetime, messages: int, **found: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.kept.append(RecordAudit(topic, until, messages, **found))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()

    @contextmanager
    def client_of(target: Any) -> Iterator[Server]:
        yield made

    def audit(spark: Any, where: Any, topics: list[str], **wishes: Any) -> AuditResult:
        wrong = {} if topics == ["good"] else WRONG
        checks = [Check(name, REFUTED if name in wrong else PROVED, 50, wrong.get(name, 0)) for name in PROMISES]
        return AuditResult(tuple(topics), 300, 50, 0, {"over": 50}, tuple(checks))

    monkeypatch.setattr(preflight, "start_spark", lambda master: None)
    monkeypatch.setattr(preflight, "check_topics", lambda *asked: None)
    monkeypatch.setattr(job, "audit", audit)
    monkeypatch.setattr(job, "client_of", client_of)
    return made


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["pipeline", "audit", *words])


SERVED = ("--to", "127.0.0.1:7400", "--json")


def test_result_is_kept_with_each_audited_topic(server: Server) -> None:
    began = datetime.now(UTC)
    printed = run(*SERVED, "--topic", "good")
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.stdout)["refuted"] == []
    (found,) = server.kept
    assert (found.topic, found.messages, found.lost, found.doubled, found.early) == ("good", 50, 0, 0, 0)
    assert (found.refuted, found.topics) == ([], 1)
    assert began <= found.until <= datetime.now(UTC)
    assert run(*SERVED, "--topic", "a", "--topic", "b").exit_code == 1
    both = server.kept[1:]
    assert [found.topic for found in both] == ["a", "b"]
    for found in both:
        assert (found.lost, found.doubled, found.early, found.topics) == (1, 6, 8, 2)
        assert set(found.refuted) == set(WRONG)


@pytest.mark.parametrize(
    "refusal",
    [
        PermissionDenied("key:1", "admin", "good"),
        Unsupported("RecordAudit", "log"),
        UnavailableError("the server does not answer"),
    ],
)
@pytest.mark.parametrize(("topic", "code"), [("good", 0), ("bad", 1)])
def test_result_that_cannot_be_kept_is_still_printed(
    server: Server, refusal: HeaplineError, topic: str, code: int
) -> None:
    server.refusal = refusal
    printed = run(*SERVED, "--topic", topic)
    assert printed.exit_code == code
    assert json.loads(printed.stdout)["messages"] == 50
    assert "result not kept with the topic" in printed.stderr
    assert str(refusal)[:30] in " ".join(printed.stderr.split())


def test_audit_of_a_directory_keeps_nothing(server: Server, tmp_path: Path) -> None:
    printed = run("--path", str(tmp_path), "--topic", "good", "--json")
    assert printed.exit_code == 0, printed.output
    assert server.kept == []
    assert "not kept" not in printed.stderr
