"""`heapline top` while its server is restarted."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from heapline.cli.top import LiveView, print_json_lines
from heapline.cli.top.keyboard import Screen
from heapline.contract.errors import BadRequest, DeadlineExceeded, TopicNotFound, Unauthenticated
from heapline.contract.message import TopicInfo, TopicStats
from tests.unit.cli.top.rig import stats


class ScriptedBroker:
    """A broker that answers each sample with the next of these."""

    def __init__(self, *looks: TopicStats | Exception) -> None:
        self._looks: Iterator[TopicStats | Exception] = iter(looks)

    async def list_topics(self) -> list[TopicInfo]:
        self._now = next(self._looks)
        if isinstance(self._now, Exception):
            raise self._now
        return [TopicInfo(name=self._now.topic, incarnation=1, config=None)]  # type: ignore[arg-type]

    async def stats(self, topic: str) -> TopicStats:
        if not hasattr(self, "_now"):  # only one topic is sampled
            found = next(self._looks)
            if isinstance(found, Exception):
                raise found
            return found
        assert isinstance(self._now, TopicStats)
        return self._now


def live(*looks: TopicStats | Exception, topic: str | None = None) -> LiveView:
    screen = Screen("queue.example:7400", 1.0, topic=topic)
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    return LiveView(ScriptedBroker(*looks), screen, console)


def text_of(view: LiveView) -> str:
    return "\n".join(line.plain for line in view.frame())


async def test_json_lines_report_a_failed_sample_and_continue(capsys: pytest.CaptureFixture[str]) -> None:
    broker: Any = ScriptedBroker(stats(ready=1), DeadlineExceeded("ListHeaps"), stats(ready=3), BadRequest("enough"))
    with pytest.raises(BadRequest):
        await print_json_lines(broker, Screen("queue.example:7400", 0.001), once=False)
    first, lost, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["topics"][0]["ready"], first["topics"][0]["rates"]) == (1, None)
    assert lost["error"] == "DeadlineExceeded"
    assert (last["topics"][0]["ready"], last["topics"][0]["rates"]["enqueued"]) == (3, 0)


async def test_unreachable_server_at_start_is_an_error() -> None:
    with pytest.raises(DeadlineExceeded):
        await print_json_lines(ScriptedBroker(DeadlineExceeded("ListHeaps")), Screen("x", 0.001), once=False)
    with pytest.raises(DeadlineExceeded):
        await live(DeadlineExceeded("ListHeaps")).run()


@pytest.mark.parametrize(
    ("error", "words"),
    [(DeadlineExceeded("ListHeaps"), "connection lost"), (Unauthenticated("the key was revoked"), "Unauthenticated")],
)
async def test_live_view_shows_an_error_keeps_its_numbers_and_recovers(error: Exception, words: str) -> None:
    view = live(stats(ready=41), error, error, stats(ready=42))
    await view.refresh()
    for _ in range(2):
        await view.refresh()
        assert f"✗ {words}" in text_of(view)
        assert "jobs                 41" in text_of(view)
    await view.refresh()
    assert words not in text_of(view)
    assert "jobs                 42" in text_of(view)


async def test_topic_deleted_while_watched_is_reported_and_shown_again_when_recreated() -> None:
    view = live(stats(ready=41), TopicNotFound("jobs"), stats(ready=7), topic="jobs")
    await view.refresh()
    await view.refresh()
    assert "topic 'jobs' no longer exists" in text_of(view)
    await view.refresh()
    assert "ready 7" in text_of(view)
