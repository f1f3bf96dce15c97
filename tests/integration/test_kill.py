"""`kill -9` with real processes: a child works on a directory and is killed at random times, again and again.

After every kill the directory is checked unchanged (`heapline journal verify`), then a copy of it is opened:
nothing that was answered is lost, no acked message exists, batches are complete or absent, and the log of the topic
that keeps it agrees with the engine in every count. The next child opens the killed directory itself. At the end
everything that is left is popped, and every answered message is accounted for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import heapline
from heapline.cli.main import app
from tests.integration.audit import LogAudit
from tests.integration.evidence import Evidence, Said
from tests.integration.killer import BROKER, KEPT, TOPICS, tag_of

ROOT = Path(__file__).parents[2]
ASKED = 200  # the latest ones; checking all would prove no more
PATIENCE = 60.0  # seconds for a child to open the directory on a busy machine


class Arena:
    """A directory, the record of its processes, and the children that work on it one after the other."""

    def __init__(self, place: Path, seed: int) -> None:
        self.data, self._side, self._place = place / "data", place / "side", place
        self._side.touch()
        self.evidence = Evidence(self._side)
        self.draw = random.Random(seed)
        self.runs = 0

    @contextlib.contextmanager
    def child(self, open_within: float) -> Iterator[None]:
        """A child that has opened the directory, or has had this many seconds to; killed at the end."""
        self.runs += 1
        command = [sys.executable, "-m", "tests.integration.killer", str(self.data), str(self._side), str(self.runs)]
        said_before = self._side.stat().st_size
        with subprocess.Popen([*command, str(self.draw.randrange(1 << 30))], cwd=ROOT) as child:
            try:
                deadline = time.monotonic() + open_within
                while self._side.stat().st_size == said_before and time.monotonic() < deadline:
                    assert child.poll() is None, f"the child ended by itself with code {child.returncode}"
                    time.sleep(0.01)
                yield
                assert child.poll() is None, f"the child ended by itself with code {child.returncode}"
            finally:
                child.kill()
        self.evidence.take_in()

    def run_and_kill(self) -> None:
        early = self.draw.random() < 0.15  # some die before or while they open
        with self.child(self.draw.uniform(0.2, 0.8) if early else PATIENCE):
            if not early:
                time.sleep(self.draw.choice([0.0, 0.05, 0.3, 0.6]) + self.draw.uniform(0, 0.3))

    def check(self) -> None:
        """The directory as the kill left it, and an opened copy of it."""
        if not (self.data / "catalog.json").exists():
            return  # killed before it had created anything
        verdict = CliRunner().invoke(app, ["journal", "verify", str(self.data)])
        assert verdict.exit_code == 0, verdict.output
        copy = self._place / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.data, copy)
        asyncio.run(self._check_open(copy))

    async def _check_open(self, copy: Path) -> None:
        async with heapline.open(copy, **BROKER) as hl:
            there = {info.name for info in await hl.list_topics()}
            for topic, said in self.evidence.topics.items():
                if topic not in there:
                    assert not said.batches, f"topic {topic} is missing"
                    continue
                await check_nothing_lost(hl, topic, said)
                if topic == KEPT:
                    await check_log(hl, topic, said)

    async def drain(self) -> None:
        """Pop and ack everything, as a worker would after the last crash."""
        async with heapline.open(self.data, **BROKER) as hl, asyncio.timeout(PATIENCE):
            for topic in TOPICS:
                said = self.evidence.topics[topic]
                while True:
                    await hl.dlq_replay(topic)
                    popped = await hl.pop(topic, 1000, visibility=60.0, wait=0.5)
                    stats = await hl.stats(topic)
                    if not popped and not (stats.ready or stats.delayed or stats.leased or stats.dead):
                        break
                    for m in popped:
                        assert m.id not in said.acked, f"NoAckedComesBack: {m.id}"
                        said.batches[tag_of(m.payload).rpartition(".")[0]].seen.add(tag_of(m.payload))
                    await hl.ack(popped)
                    said.ack_begun.update(m.id for m in popped)
                self.evidence.check_batches_drained(topic)
                assert not said.must_live, f"NoLostMessage: {said.must_live[:5]} were never delivered"


async def check_nothing_lost(hl: heapline.Broker, topic: str, said: Said) -> None:
    # Where the log is kept it accounts for every message (check_log); elsewhere each message is looked up.
    living = said.must_live[-ASKED:] if topic == KEPT else said.must_live
    for id, state in zip(living, await states_of(hl, topic, living), strict=True):
        assert state in ("ready", "delayed", "leased", "dead"), f"NoLostMessage: {id} is {state}"
    acked = list(said.acked)[-ASKED:]
    for id, state in zip(acked, await states_of(hl, topic, acked), strict=True):
        assert state in ("acked", "forgotten"), f"NoAckedComesBack: {id} is {state}"


async def states_of(hl: heapline.Broker, topic: str, ids: list[int]) -> list[str]:
    async def state_of(id: int) -> str:
        try:
            return (await hl.get(topic, id)).state
        except heapline.MessageNotFound:
            return "forgotten"

    return await asyncio.gather(*(state_of(id) for id in ids))


async def check_log(hl: heapline.Broker, topic: str, said: Said) -> None:
    audit = LogAudit()
    await audit.read(hl, topic)
    stats = await hl.stats(topic)
    if stats.partitions[0].offset == audit.rows:  # otherwise time passed while the log was read
        found = {"ready": stats.ready, "delayed": stats.delayed, "leased": stats.leased, "dead": stats.dead}
        assert audit.states() == found
    for id in said.enqueued:
        assert id in audit.priority, f"NoLostMessage: {id} is not in the log"
    missing = [end for end in said.ended if end not in audit.happened]
    assert not missing, f"answered, but not in the log: {missing[:5]}"
    for id, tokens in said.tokens.items():
        assert all(("pop", id, token) in audit.happened for token in tokens), f"a lease of {id} is not in the log"
    check_batches_whole(audit, said)


def check_batches_whole(audit: LogAudit, said: Said) -> None:
    counts: dict[str, int] = {}
    for tag in audit.tags.values():
        name = tag.rpartition(".")[0]
        counts[name] = counts.get(name, 0) + 1
    for name, batch in said.batches.items():
        found = counts.get(name, 0)
        assert found in (0, batch.size), f"BatchAllOrNothing: {found} of {batch.size} of batch {name}"
        assert found or batch.ids is None, f"NoLostMessage: batch {name} was answered"


def play(place: Path, kills: int, seed: int) -> None:
    print(f"seed {seed}")
    arena = Arena(place, seed)
    for _ in range(kills):
        arena.run_and_kill()
        arena.check()
    asyncio.run(arena.drain())
    print(f"{kills} kills; answered: {dict(arena.evidence.answered)}")
    assert arena.evidence.answered["ack"] > 0
    assert arena.evidence.answered["enqueue"] > 0


@pytest.mark.slow
def test_nothing_answered_is_lost_by_kill_9(tmp_path: Path) -> None:
    play(tmp_path, kills=6, seed=2026)


@pytest.mark.slow
def test_journal_commands_run_beside_a_busy_engine(tmp_path: Path) -> None:
    arena = Arena(tmp_path, seed=7)
    dump = ["dump", str(arena.data), "--topic", "lean", "--json"]
    with arena.child(PATIENCE):
        for command in (["verify", str(arena.data)], dump, ["stats", str(arena.data)]) * 3:
            result = CliRunner().invoke(app, ["journal", *command])
            assert result.exit_code == 0, result.output
    arena.check()


@pytest.mark.soak
@pytest.mark.parametrize("directory", range(30))
def test_nothing_answered_is_lost_by_hundreds_of_kills(tmp_path: Path, directory: int) -> None:
    play(tmp_path, kills=12, seed=random.SystemRandom().randrange(1 << 31))
