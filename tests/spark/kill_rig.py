"""A server and the drivers that are killed on it: the faults, by seed, and the invariants at the end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import heapline
from heapline.contract.message import Outgoing
from heapline.spark.options import parse_options
from heapline.spark.prepared_batches import stream_batch, write
from heapline.spark.read_plan import plan_batch, read
from heapline.spark.target import resolve, source_of
from heapline.spark.write_options import parse_write
from tests.integration.server_process import Process
from tests.spark.driver_process import Driver, Report

SEEDS = "HEAPLINE_SOAK_SEEDS"
OUTS = ("out", "left", "right")
QUERIES = ("sink", "both")


def seeds() -> list[int]:
    """In the long form: seeds counted from 0, or a range such as 5-9."""
    first, dash, last = os.environ.get(SEEDS, "3").partition("-")
    return list(range(int(first), int(last) + 1)) if dash else list(range(int(first)))


class Scene:
    """Topic `in` with numbered rows, a server on a fixed port, and directories for checkpoints and lake."""

    def __init__(self, folder: Path, rows: int, batch_rows: int) -> None:
        self.folder, self.rows, self.batch_rows = folder, rows, batch_rows
        self.data, self.lake = folder / "data", folder / "lake"
        self._server = Process(self.data, "--port", str(free_port()))
        self._loop = asyncio.Runner()
        self._runs = 0
        self.record: Counter[str] = Counter()  # the faults so far

    def __enter__(self) -> Scene:
        self._loop.run(self._server.__aenter__())
        self.where = {"heapline.url": self._server.target, "heapline.api_key_file": str(self.data / "admin.key")}
        with self.client() as hl:
            for topic in ("in", *OUTS):
                hl.create_topic(topic, partitions=2)
            for first in range(0, self.rows, 1000):
                numbers = range(first, min(first + 1000, self.rows))
                hl.enqueue_batch("in", [Outgoing(b"%d" % i) for i in numbers])
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._server.__aexit__())
        self._loop.close()

    def client(self) -> Any:
        return heapline.connect_sync(self._server.target, api_key=(self.data / "admin.key").read_text().strip())

    def restart_server(self) -> None:
        """Kill it with -9 and start it again; writers must wait."""
        self.record["server killed"] += 1
        self._loop.run(self._server.kill())
        self._loop.run(self._server.spawn())
        self._loop.run(self._server.ready())

    @contextmanager
    def driver(self, seed: int, throw: float, *, alone: bool = False) -> Iterator[Driver]:
        """Leaving the block kills it; without its driver, its workers continue until then."""
        given = {
            "where": self.where, "checkpoints": str(self.folder / "checkpoints"), "lake": str(self.lake),
            "seed": seed, "run": self._runs, "throw": throw, "batch_rows": self.batch_rows,
            "round_rows": self.batch_rows * 3, "alone": alone,
        }  # fmt: skip
        self._runs += 1
        self.record["drivers"] += 1
        with Driver("kill_driver.py", self.folder / f"driver{self._runs}.log", **given) as driver:
            yield driver

    # -- changes to checkpoints, and late tasks ------------------------------------------------------------------------

    def forget_last_commits(self) -> None:
        """As if the driver had been killed after the sink's commit and before Spark recorded it."""
        for name in QUERIES:
            commits = self.folder / "checkpoints" / name / "commits"
            numbers = [int(path.name) for path in commits.glob("*") if path.name.isdigit()]
            if numbers:
                (commits / str(max(numbers))).unlink()
                (commits / f".{max(numbers)}.crc").unlink(missing_ok=True)
                self.record["commits replayed"] += 1

    def query_id(self) -> str:
        found = json.loads((self.folder / "checkpoints/sink/metadata").read_text())
        return str(found["id"])

    def last_batch(self) -> int:
        """The last batch that the stream to the sink has planned."""
        numbers = (self.folder / "checkpoints/sink/offsets").glob("*")
        return max((int(path.name) for path in numbers if path.name.isdigit()), default=0)

    def zombie(self, batch: int) -> None:
        """An attempt of a task that still works for a dead driver."""
        options = {**self.where, "topic": "out"}
        chosen = resolve(parse_write(options, {"value": "binary"}, streaming=True, overwrite=False))
        rows = pa.RecordBatch.from_pydict({"value": [b"zombie"] * 20})
        write(chosen, stream_batch(self.query_id(), batch), [rows], partition=0, attempt=7)
        self.record["zombies"] += 1

    # -- invariants ----------------------------------------------------------------------------------------------------

    def values(self, topic: str) -> Counter[bytes]:
        """Return the values of view `messages`, as the format reads them."""
        given = {"path": str(self.data), "subscribe": topic, "columns": "value"}
        options = resolve(parse_options(given, streaming=False))
        source = source_of(options)
        found: Counter[bytes] = Counter()
        for work in plan_batch(source, options):
            for batch in read(source, work, options):
                found.update(batch.column(0).to_pylist())
        return found

    def archived(self) -> Counter[bytes]:
        from deltalake import DeltaTable

        table = pa.table(DeltaTable(str(self.lake / "messages")).to_pyarrow_table(columns=["value"]))
        return Counter(table.column("value").to_pylist())

    def check(self, last: list[Report]) -> None:
        wanted = Counter(b"%d" % i for i in range(self.rows))
        for topic in OUTS:
            assert differences(self.values(topic), wanted) == {}, topic
        assert differences(self.archived(), wanted) == {}
        with self.client() as hl:
            for topic in OUTS:
                stats = hl.stats(topic)
                found = stats.ready, sum(p.prepared for p in stats.partitions)
                undecided = [batch for batch in hl.list_batches() if batch.state == "undecided"]
                assert found == (self.rows, 0), (topic, found, undecided)
        [audit] = [reported["audit"] for reported in last if "audit" in reported]
        assert (audit["refuted"], audit["messages"]) == ([], (1 + len(OUTS)) * self.rows), audit


def differences(found: Counter[bytes], wanted: Counter[bytes]) -> dict[str, Any]:
    """Return missing and extra values; a few of each."""
    lost, more = wanted - found, found - wanted
    reported = {"lost": lost, "more": more}
    return {name: (sum(which.values()), which.most_common(5)) for name, which in reported.items() if which}


def disturb(scene: Scene, seed: int, runs: int, throw: float = 0.05) -> list[Report]:
    """Make runs that are killed, each on the last one's checkpoints; return the reports of the last, which is not."""
    rng = random.Random(seed)
    with ExitStack() as bodies:
        for _ in range(runs):
            driver = bodies.enter_context(scene.driver(seed, throw))
            kill_once(scene, driver, rng)
            if rng.random() < 0.7:
                scene.forget_last_commits()
            if scene.folder.joinpath("checkpoints/sink/metadata").exists():
                scene.zombie(scene.last_batch())
        driver = bodies.enter_context(scene.driver(seed, throw))
        last = list(driver.reported())
        assert any("done" in reported for reported in last), driver.everything()[-4000:]
        scene.record["queries failed"] += sum("failed" in reported for reported in last)
        scene.zombie(scene.last_batch())
        scene.zombie(0)
    return last


def kill_once(scene: Scene, driver: Driver, rng: random.Random) -> None:
    """Wait for a random time, then kill: possibly first the server, and in any case the driver."""
    moments = [rng.randrange(3), rng.randrange(6)]  # batches that complete before
    for number, batches in enumerate(moments):
        left = iter(range(batches))
        if driver.wait_for(lambda reported, left=left: "batch" in reported and next(left, None) is None) is None:
            scene.record["ended by itself"] += 1
            break
        time.sleep(rng.uniform(0, 0.5))  # anywhere in a batch
        if number == 0 and rng.random() < 0.7:
            scene.restart_server()
    if rng.random() < 0.5:
        scene.record["driver killed"] += 1
        driver.kill()
    else:
        scene.record["driver beheaded"] += 1
        driver.behead()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
