"""The worst that Spark does to its sinks, without Spark: a driver that tries, fails, forgets and repeats, by seed.

Real Spark shows a few of these orders of events, and slowly (tests/spark/test_sink_kill.py). Here a short driver
makes the calls of Spark's tasks and commits, against a server that is killed now and then: attempts die in the middle
of their rows, two attempts of a task both finish, others continue after their query ended, a driver dies before or
after its commit or commits again after another has taken over, and replayed rows are divided among other tasks. At the
end each row is one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

import heapline  # noqa: E402
from heapline.contract.errors import UnknownPart  # noqa: E402
from heapline.spark.options import parse_options  # noqa: E402
from heapline.spark.prepared_batches import (  # noqa: E402
    Batch,
    Written,
    abort,
    commit,
    stream_batch,
    write,
    write_batch,
)
from heapline.spark.read_plan import plan_batch, read  # noqa: E402
from heapline.spark.target import resolve, source_of  # noqa: E402
from heapline.spark.write_options import WriteOptions, parse_write  # noqa: E402
from tests.integration.server_process import Process  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sink_faults")]
BATCHES, ROWS = 12, 40
SEEDS = int(os.environ.get("HEAPLINE_FAULT_SEEDS", "200"))


class Died(Exception):
    """A process was killed here."""


class Server:
    def __init__(self, data: Path) -> None:
        self.data = data
        self._process = Process(data)
        self._loop = asyncio.Runner()
        self.kills = 0

    def __enter__(self) -> Server:
        self._loop.run(self._process.__aenter__())
        # The same port from now on, so that writers find it again.
        self._process._flags = ("--port", self._process.target.rpartition(":")[2])
        self.where = {"heapline.url": self._process.target, "heapline.api_key_file": str(self.data / "admin.key")}
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._process.__aexit__())
        self._loop.close()

    def client(self) -> Any:
        return heapline.connect_sync(self._process.target, api_key=(self.data / "admin.key").read_text().strip())

    def kill(self) -> None:
        self.kills += 1
        self._loop.run(self._process.kill())
        self._loop.run(self._process.spawn())
        self._loop.run(self._process.ready())

    def options(self, topic: str, **more: str) -> WriteOptions:
        given = {**self.where, "topic": topic, **more}
        return resolve(parse_write(given, {"value": "binary"}, streaming=not more, overwrite=False))

    def values(self, topic: str) -> Counter[bytes]:
        given = {"path": str(self.data), "subscribe": topic, "columns": "value"}
        options = resolve(parse_options(given, streaming=False))
        source = source_of(options)
        pieces = [read(source, work, options) for work in plan_batch(source, options)]
        return Counter(value for piece in pieces for batch in piece for value in batch.column(0).to_pylist())


class NaiveSpark:
    """One query: its batches, each repeated until this driver has recorded its commit."""

    def __init__(self, rng: random.Random, server: Server, topic: str, batch_of: Callable[[int], Batch]) -> None:
        self._rng, self._server, self._batch_of = rng, server, batch_of
        self._topic = topic
        self._options = server.options(topic)
        self._late: list[Callable[[], object]] = []  # calls that continue although no caller waits for them
        self.tries = 0

    def run(self) -> None:
        for number in range(BATCHES):
            while True:
                self.tries += 1
                assert self.tries < 100 * BATCHES
                try:
                    self._try(number)
                    break  # recorded
                except Died:
                    self._something_late()
        while self._late:
            self._something_late(always=True)

    def _try(self, number: int) -> None:
        batch = self._batch_of(number)
        winners: list[Written] = []
        for partition, rows in enumerate(self._cut(number)):
            winners.append(self._task(batch, partition, rows))
            self._something_late()
            if self._rng.random() < 0.05:  # another task failed too often: the query ends
                if self._rng.random() < 0.5:
                    abort(self._options, batch, winners)
                raise Died
        if self._rng.random() < 0.02:
            self._server.kill()
        if self._rng.random() < 0.1:
            if self._rng.random() < 0.3:  # considered dead, it still commits after another has restarted
                self._late.append(lambda: _as_it_may(lambda: commit(self._options, batch, winners)))
            raise Died  # before its commit
        commit(self._options, batch, winners)
        if self._rng.random() < 0.15:
            raise Died  # after its commit, before recording it

    def _cut(self, number: int) -> Iterator[list[bytes]]:
        """Divide the rows of a batch among other tasks each time."""
        rows = [b"%d" % i for i in range(number * ROWS, (number + 1) * ROWS)]
        cuts = sorted(self._rng.choices(range(ROWS + 1), k=self._rng.randrange(3)))
        for first, last in zip([0, *cuts], [*cuts, ROWS], strict=True):
            yield rows[first:last]

    def _task(self, batch: Batch, partition: int, rows: list[bytes]) -> Written:
        for attempt in range(20):
            fate = self._rng.random()
            if fate < 0.1:
                self._attempt(batch, partition, attempt, rows, dies=True)
            elif fate < 0.15:  # the driver loses sight of it, and it continues
                self._late.append(lambda at=attempt: self._attempt(batch, partition, at, rows))  # type: ignore[misc]
            else:
                if fate < 0.25:  # another one for the same rows finishes as well, and is not committed
                    self._attempt(batch, partition, attempt + 100, rows)
                done = self._attempt(batch, partition, attempt, rows)
                assert done is not None
                return done
        raise Died

    def _attempt(
        self, batch: Batch, partition: int, attempt: int, rows: list[bytes], dies: bool = False
    ) -> Written | None:
        def batches() -> Iterator[Any]:
            for first in range(0, len(rows), 15):
                yield pa.RecordBatch.from_pydict({"value": pa.array(rows[first : first + 15], pa.binary())})
                if dies and first >= 15:
                    raise Died
            if dies:
                raise Died

        try:
            return write(self._options, batch, batches(), partition, attempt)
        except Died:
            return None

    def _something_late(self, always: bool = False) -> None:
        if self._late and (always or self._rng.random() < 0.2):
            self._late.pop(self._rng.randrange(len(self._late)))()


def _as_it_may(act: Callable[[], object]) -> None:
    with contextlib.suppress(UnknownPart):  # the parts it names were dropped by the other's commit or abort
        act()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("sinks") / "data") as found:
        yield found


def prove(server: Server, seed: int, kind: str) -> None:
    rng, topic = random.Random(f"{seed}.{kind}"), f"{kind}-{seed}"
    with server.client() as hl:
        hl.create_topic(topic, partitions=rng.choice([1, 3]), segment_bytes=1 << 20, max_payload_bytes=1 << 18)
    of_stream: Callable[[int], Batch] = lambda number: stream_batch(f"query-{seed}", number)  # noqa: E731
    of_writes: Callable[[int], Batch] = lambda number: write_batch((f"app-{seed}", number))  # noqa: E731
    NaiveSpark(rng, server, topic, of_stream if kind == "stream" else of_writes).run()
    wanted, found = Counter(b"%d" % i for i in range(BATCHES * ROWS)), server.values(topic)
    assert (wanted - found, found - wanted) == (Counter(), Counter()), f"seed {seed}"
    with server.client() as hl:
        assert hl.stats(topic).ready == BATCHES * ROWS
        hl.delete_topic(topic)


@pytest.mark.parametrize("kind", ["stream", "writes"])
@pytest.mark.parametrize("seed", range(4))
def test_each_row_is_one_message_in_any_order_of_failures(server: Server, seed: int, kind: str) -> None:
    prove(server, seed, kind)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["stream", "writes"])
def test_many_orders_of_failures_neither_lose_nor_duplicate_a_row(tmp_path: Path, kind: str) -> None:
    with Server(tmp_path / "data") as server:
        for seed in range(SEEDS):
            prove(server, seed, kind)
        assert server.kills > 0 or SEEDS < 20
