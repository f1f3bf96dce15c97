"""Views of open pages: rendered once for all who watch with the same rights, and only what changed is sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from heapline.contract.errors import ResourceExhausted, TopicNotFound, Unauthenticated
from heapline.dashboard.caller import Memory
from heapline.dashboard.live import PERIOD, PERIOD_MAX, View, Views, Watcher, pause
from heapline.dashboard.page import PageKind, Place
from heapline.dashboard.render import Parts
from heapline.dashboard.topic_rows import read_stats
from heapline.server.auth.principals import Principal, parse_scope

PLACE = Place("/topics", {}, {})


class Counted:
    """A page whose parts a test sets. Counts how often it is read."""

    def __init__(self) -> None:
        self.parts = {"a": "1", "b": "1"}
        self.order = {"rows": ["a", "b"]}
        self.reads = 0
        self.error: Exception | None = None
        self.kind = PageKind("/topics", "topics", "topics.html", self.load)

    async def load(self, caller: Any, place: Place) -> dict[str, Any]:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return {}

    def render(self, kind: PageKind, place: Place, caller: Any, variables: dict[str, Any]) -> Parts:
        made = Parts()
        made.html, made.order = dict(self.parts), {name: list(ids) for name, ids in self.order.items()}
        return made


class Caller:
    def __init__(self, subject: str = "key:1", scope: str = "*:consume") -> None:
        self.principal = Principal(subject, (parse_scope(scope),))


async def first(events: AsyncIterator[bytes]) -> bytes:
    """Return the next event that is not a comment."""
    while True:
        event = await anext(events)
        if not event.startswith(b":"):
            return event


def decoded(event: bytes) -> Any:
    return msgspec.json.decode(event.removeprefix(b"data: "))


def never() -> None:
    return None


async def test_hundred_watchers_share_one_rendering_and_its_bytes() -> None:
    page = Counted()
    views = Views(page.render)
    with contextlib.ExitStack() as stack:
        watchers = [stack.enter_context(views.watch([(page.kind, PLACE)], Caller(f"key:{n}"))) for n in range(100)]
        streams = [watcher.events(never) for watcher in watchers]
        received = await asyncio.gather(*map(first, streams))
    assert page.reads == 1
    assert all(event is received[0] for event in received)


async def test_other_rights_have_a_view_of_their_own() -> None:
    page = Counted()
    views = Views(page.render)
    with (
        views.watch([(page.kind, PLACE)], Caller()) as one,
        views.watch([(page.kind, PLACE)], Caller(scope="a:consume")) as other,
    ):
        await asyncio.gather(first(one.events(never)), first(other.events(never)))
    assert page.reads == 2


async def test_only_changed_parts_are_sent_and_a_slow_watcher_receives_all_it_missed() -> None:
    page = Counted()
    view = View(page.kind, PLACE, page.render)
    view.watchers[Watcher([view])] = Caller()
    await view._refresh()
    assert decoded(view.since(0))["parts"] == {"a": "1", "b": "1"}
    page.parts["a"] = "2"
    await view._refresh()
    assert decoded(view.since(1))["parts"] == {"a": "2"}
    page.parts["b"] = "2"
    await view._refresh()
    assert decoded(view.since(2))["parts"] == {"b": "2"}
    assert decoded(view.since(1))["parts"] == {"a": "2", "b": "2"}
    await view._refresh()
    assert view.version == 3  # nothing changed, so nothing is sent


async def test_error_of_a_page_is_sent_and_its_parts_stay() -> None:
    page = Counted()
    view = View(page.kind, PLACE, page.render)
    view.watchers[Watcher([view])] = Caller()
    await view._refresh()
    page.error = TopicNotFound("jobs")
    await view._refresh()
    sent = decoded(view.since(1))
    assert "'jobs' does not exist" in sent["error"]
    assert sent["parts"] == {}
    page.error = None
    await view._refresh()
    assert decoded(view.since(2))["error"] == ""


async def test_view_ends_when_nobody_watches_and_is_read_at_once_after_a_change() -> None:
    page = Counted()
    views = Views(page.render)
    with views.watch([(page.kind, PLACE)], Caller()) as one:
        events = one.events(never)
        await first(events)
        page.parts["a"] = "2"
        views.poke()
        assert decoded(await first(events))["parts"] == {"a": "2"}
    views.poke()
    await views._tasks.join()
    assert not views._views


async def test_stream_ends_with_the_words_of_its_session() -> None:
    page = Counted()
    views = Views(page.render)
    with views.watch([(page.kind, PLACE)], Caller()) as one:
        received = [event async for event in one.events(lambda: b"event: signed-out\n\n")]
    assert received[-1] == b"event: signed-out\n\n"


def test_views_together_take_a_bounded_share_of_the_processor() -> None:
    assert pause(0.001, 1) == PERIOD
    assert pause(0.1, 1) == pytest.approx(2.5)
    assert pause(0.01, 40) == pytest.approx(10.0)
    assert pause(5.0, 100) == PERIOD_MAX


async def test_number_of_open_views_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.dashboard.live.OPEN_MAX", 1)
    page = Counted()
    views = Views(page.render)
    with views.watch([(page.kind, PLACE)], Caller()), views.watch([(page.kind, PLACE)], Caller()):
        other = Place("/topics", {}, {"q": "a"})
        with pytest.raises(ResourceExhausted, match="1"), views.watch([(page.kind, other)], Caller()):
            pass


@pytest.mark.parametrize(
    "problem",
    [Unauthenticated("revoked"), ResourceExhausted("calls in flight of key:1", 1)],
    ids=["revoked", "limited"],
)
async def test_watcher_that_may_not_read_any_more_does_not_stop_the_others(problem: Exception) -> None:
    """A client that does not read keeps its stream open after its key was revoked, or is over a limit of its key."""
    page = Counted()
    broken = Caller("key:1")
    allowed = page.load

    async def load(caller: Any, place: Place) -> dict[str, Any]:
        if caller is broken:
            raise problem
        return await allowed(caller, place)

    views = Views(page.render)
    kind = PageKind("/topics", "topics", "topics.html", load)
    with views.watch([(kind, PLACE)], broken), views.watch([(kind, PLACE)], Caller("key:2")) as other:
        event = decoded(await first(other.events(never)))
    assert event["parts"] == page.parts
    assert event["error"] == ""


async def test_statistics_of_all_topics_are_read_once_for_pages_with_the_same_rights() -> None:
    class Reader(Caller):
        reads = 0

        def __init__(self, memory: Memory, scope: str) -> None:
            super().__init__(scope=scope)
            self.memory = memory

        async def all(self, kind: Any, **fields: Any) -> tuple[list[Any], bool]:
            Reader.reads += 1
            await asyncio.sleep(0)
            sum(range(200_000))  # some milliseconds of the processor
            return [], False

    memory: Any = Memory()
    readers: list[Any] = [Reader(memory, "*:consume") for _ in range(5)]
    await asyncio.gather(*(read_stats(reader) for reader in readers))
    assert Reader.reads == 1
    assert memory.shared_seconds > 0
    other: Any = Reader(memory, "a:consume")
    await read_stats(other)
    assert Reader.reads == 2
    memory.forget_stats()  # a person has changed something
    await read_stats(readers[0])
    assert Reader.reads == 3
