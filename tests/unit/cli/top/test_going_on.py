"""`top` while the server comes and goes: what it says, and that it goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from heapline.cli.top import command
from heapline.cli.top.live import LiveView
from heapline.cli.top.screen import Screen
from heapline.errors import BadRequest, DeadlineExceeded, TopicNotFound, Unauthenticated
from heapline.model import TopicInfo, TopicStats
from tests.unit.cli.top.rig import stats


class Told:
    """A broker that answers each look with the next of these."""

    def __init__(self, *looks: TopicStats | Exception) -> None:
        self._looks: Iterator[TopicStats | Exception] = iter(looks)

    async def list_topics(self) -> list[TopicInfo]:
        self._now = next(self._looks)
        if isinstance(self._now, Exception):
            raise self._now
        return [TopicInfo(name=self._now.topic, incarnation=1, config=None)]  # type: ignore[arg-type]

    async def stats(self, topic: str) -> TopicStats:
        if not hasattr(self, "_now"):  # asked for one topic, without a list
            found = next(self._looks)
            if isinstance(found, Exception):
                raise found
            return found
        assert isinstance(self._now, TopicStats)
        return self._now


def live(*looks: TopicStats | Exception, topic: str | None = None) -> LiveView:
    screen = Screen("queue.example:7400", 1.0, topic=topic)
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    return LiveView(Told(*looks), screen, console)


def text_of(view: LiveView) -> str:
    return "\n".join(line.plain for line in view.frame())


async def test_lines_of_json_tell_of_a_look_that_failed_and_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    broker: Any = Told(stats(ready=1), DeadlineExceeded("ListHeaps"), stats(ready=3), BadRequest("enough"))
    with pytest.raises(BadRequest):
        await command._tell(broker, Screen("queue.example:7400", 0.001), once=False)
    first, lost, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["topics"][0]["ready"], first["topics"][0]["rates"]) == (1, None)
    assert lost["error"] == "DeadlineExceeded"
    assert (last["topics"][0]["ready"], last["topics"][0]["rates"]["enqueued"]) == (3, 0)


async def test_server_that_is_not_there_at_first_is_an_error() -> None:
    with pytest.raises(DeadlineExceeded):
        await command._tell(Told(DeadlineExceeded("ListHeaps")), Screen("x", 0.001), once=False)
    with pytest.raises(DeadlineExceeded):
        await live(DeadlineExceeded("ListHeaps")).run()


@pytest.mark.parametrize(
    ("error", "words"),
    [(DeadlineExceeded("ListHeaps"), "connection lost"), (Unauthenticated("the key was revoked"), "Unauthenticated")],
)
async def test_view_says_what_is_wrong_keeps_what_it_knew_and_is_well_again(error: Exception, words: str) -> None:
    view = live(stats(ready=41), error, error, stats(ready=42))
    await view._look_or_tell()
    for _ in range(2):
        await view._look_or_tell()
        assert f"✗ {words}" in text_of(view)
        assert "jobs                 41" in text_of(view)
    await view._look_or_tell()
    assert words not in text_of(view)
    assert "jobs                 42" in text_of(view)


async def test_topic_deleted_while_it_is_watched_is_said_to_be_gone_and_shown_when_it_is_made_again() -> None:
    view = live(stats(ready=41), TopicNotFound("jobs"), stats(ready=7), topic="jobs")
    await view._look_or_tell()
    await view._look_or_tell()
    assert "there is no topic 'jobs' any more" in text_of(view)
    await view._look_or_tell()
    assert "ready 7" in text_of(view)
