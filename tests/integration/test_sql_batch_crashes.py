"""Batches over two shards, with nodes crashed at every await: Hypothesis chooses the calls and the crashes.

A node dies at any statement, before the server executes it or after (the answer is lost). The next one repeats the
batch. At the end each batch is in both shards or in neither, once, and what was answered holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import heapline
import heapline.sql
from heapline import Outgoing
from heapline.sql.placement import shard_of
from tests.integration.sql_cutter import PHASES, cuttable_connections, cutter
from tests.integration.sql_rig import crash, take_all
from tests.postgres import fresh_schema, shared_url

asyncpg = pytest.importorskip("asyncpg")


@pytest.fixture(scope="module", autouse=True)
def cuttable() -> Iterator[None]:
    with cuttable_connections():
        yield


class Batches:
    """A producer that prepares and commits one batch after another, and repeats the one whose outcome is unknown."""

    def __init__(self, urls: list[str], schema: str) -> None:
        self.urls, self.schema, self.topics = urls, schema, topics_on_both(next(_runs))
        self.count = 0
        self.committed: set[bytes] = set()  # that was answered
        self.aborted: set[bytes] = set()

    def node(self) -> Any:
        return heapline.sql.open(self.urls, schema=self.schema)

    async def live(self, cut: tuple[int, bool], aborts: list[bool]) -> None:
        node = await self.node().__aenter__()
        cutter.left, cutter.is_after = cut
        try:
            for aborted in aborts:
                await (self.abort(node) if aborted else self.commit(node))
                self.count += 1
        except heapline.UnavailableError:
            pass
        finally:
            await crash(node)
            cutter.left = None

    async def prepare(self, node: Any) -> bytes:
        tag, name = b"%d" % self.count, f"{self.topics[0]}-{self.count}"
        shares = {topic: [Outgoing(tag, idempotency_key=name), Outgoing(tag + b"'")] for topic in self.topics}
        with contextlib.suppress(heapline.BatchDecided):
            await node.prepare_batch(name, "1", shares)
        return tag

    async def commit(self, node: Any) -> None:
        tag = await self.prepare(node)
        sink = {"sink": self.topics[0], "version": self.count} if self.count % 2 else {}
        assert await node.commit_batch(f"{self.topics[0]}-{self.count}", ["1"], **sink) == 4
        self.committed.add(tag)

    async def abort(self, node: Any) -> None:
        tag = await self.prepare(node)
        with contextlib.suppress(heapline.BatchDecided):  # it was committed before the crash
            await node.abort_batch(f"{self.topics[0]}-{self.count}")
            self.aborted.add(tag)

    async def check(self) -> None:
        async with self.node() as node:
            await node._sweeper.sweep()
            one, two = [Counter(await take_all(node, topic)) for topic in self.topics]
        assert one == two, "a part of a batch is missing"
        assert max(one.values(), default=1) == 1, "attached twice"
        assert set(one) == {payload for tag in one for payload in (tag.rstrip(b"'"), tag.rstrip(b"'") + b"'")}
        assert self.committed <= set(one)
        assert not self.aborted & set(one)


_runs = itertools.count()


def topics_on_both(run: int) -> list[str]:
    """Return a topic on each of two shards."""
    found = {shard_of("default", name, 2): name for name in (f"run-{run}-{i}" for i in range(40))}
    return [found[0], found[1]]


@pytest.fixture(scope="module")
def databases() -> Iterator[list[str]]:
    """The databases of two shards."""
    name = fresh_schema()

    async def ask(query: str) -> None:
        admin = await asyncpg.connect(shared_url())
        await admin.execute(query)
        await admin.close()

    asyncio.run(ask(f"CREATE DATABASE {name} STRATEGY FILE_COPY"))
    yield [shared_url(), shared_url(name)]
    asyncio.run(ask(f"DROP DATABASE {name} WITH (FORCE)"))


cut = st.tuples(st.integers(1, 60), st.booleans())
short_life = st.tuples(cut, st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=4))


@settings(max_examples=10, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(st.lists(short_life, min_size=1, max_size=4))
async def test_batches_over_shards_are_whole_after_crashes(
    databases: list[str], lives: list[tuple[tuple[int, bool], list[bool]]]
) -> None:
    story = Batches(databases, "crashed_batches")
    async with story.node() as maker:
        for topic in story.topics:
            await maker.create_topic(topic)
    for cut, aborts in lives:
        await story.live(cut, aborts)
    await story.check()
