"""The client with processes and threads: a server that is killed, forks, and blocking code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import heapline
from heapline.contract.errors import Closed
from tests.integration.proxy import Proxy
from tests.integration.server_rig import until
from tests.integration.test_server_kill import Process

pytestmark = pytest.mark.slow
COROUTINES = 256
SMALL = {"segment_bytes": 1 << 20, "max_payload_bytes": 1 << 16}


def free_port() -> int:
    with socket.socket() as plug:
        plug.bind(("127.0.0.1", 0))
        port: int = plug.getsockname()[1]
        return port


async def test_server_killed_under_256_coroutines_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    flags = ("--insecure-everybody", "--port", str(free_port()))
    asked: Counter[bytes] = Counter()
    ids: dict[bytes, int] = {}
    acked: Counter[bytes] = Counter()
    lost = 0
    enough = asyncio.Event()

    async def lifecycle(name: int) -> None:
        nonlocal lost
        number = 0
        while not enough.is_set():
            payload, number = b"%d-%d" % (name, number), number + 1
            asked[payload] += 1
            ids[payload] = (await hl.enqueue("jobs", payload)).id
            for message in await hl.pop("jobs", 1, wait=0.5, visibility=600):
                try:
                    await message.ack()
                except heapline.LeaseLost:
                    lost += 1
                else:
                    acked[message.payload] += 1

    async with Process(tmp_path, *flags) as server:
        hl = heapline.connect(server.target, deadline=60)
        await hl.create_topic("jobs", **SMALL)
        work = [asyncio.ensure_future(lifecycle(n)) for n in range(COROUTINES)]
        async with asyncio.timeout(60):
            while len(acked) < 600:  # noqa: ASYNC110 - whenever it is, it is in the midst of it
                await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGKILL)
        await server.process.wait()
    before = len(acked)
    async with Process(tmp_path, *flags):
        async with asyncio.timeout(90):
            while len(acked) < before + 600:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            enough.set()
            await asyncio.gather(*work)
            while left := await hl.pop("jobs", 1000):
                acked.update(m.payload for m in left)
                await hl.ack(left)
        stats = await hl.stats("jobs")
        await hl.close()
    assert lost == 0, "an applied ack was reported as lost"
    assert set(ids) == set(asked)
    assert len(set(ids.values())) == len(ids)
    assert stats.ready == stats.delayed == 0
    twice = [payload for payload, count in acked.items() if count > 1]
    assert twice == [], "a message was delivered again after its ack, or enqueued twice"
    missing = set(asked) - set(acked)
    assert len(missing) == stats.leased == 0, "leases of a lost response were returned again"


# -- forks -------------------------------------------------------------------------------------------------------------

FORKED = """
import asyncio, os, sys, heapline
hl = {connect}

async def use():
    result = await hl.enqueue("jobs", b"x")
    return result.id

def once():
    return {once}

if "used" in sys.argv:
    once()
child = os.fork()
if not child:
    try:
        print("child", once() > 0, flush=True)
    except heapline.HeaplineError as error:
        print("child", type(error).__name__, error, flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
print("status", status, flush=True)
print("parent", once() > 0, flush=True)
os._exit(0)
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Process]:
    async with Process(tmp_path, "--insecure-everybody") as server:
        async with heapline.connect(server.target) as hl:
            await hl.create_topic("jobs", **SMALL)
        yield server


async def test_client_waits_for_a_starting_server_and_reads_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    async with heapline.connect(f"localhost:{port}", deadline=60) as hl:
        early = asyncio.ensure_future(hl.create_topic("jobs", **SMALL))
        await asyncio.sleep(0)
        async with Process(tmp_path / "data", "--port", str(port)):
            assert (await early).name == "jobs"


async def forked(server: Process, connect: str, once: str, *arguments: str) -> list[str]:
    program = FORKED.format(connect=f"heapline.{connect}({server.target!r}, deadline=20)", once=once)
    environment = {**os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1])}
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    received, _ = await asyncio.wait_for(run.communicate(), 60)
    return received.decode().splitlines()


FORKED_OFTEN = """
import os, sys, heapline
hl = heapline.connect_sync({target!r}, deadline=20)
for _ in range(60):
    hl.enqueue("jobs", b"x")
    if not (child := os.fork()):
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a child crashed"
print("well", flush=True)
os._exit(0)
"""


async def test_children_of_a_busy_client_work(server: Process) -> None:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKED_OFTEN.format(target=server.target), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1])},
    )  # fmt: skip
    received, _ = await asyncio.wait_for(run.communicate(), 60)
    assert received.decode().splitlines()[-1] == "well"


WAYS = [("connect", "asyncio.run(use())"), ("connect_sync", 'hl.enqueue("jobs", b"x").id')]


@pytest.mark.parametrize(("connect", "once"), WAYS)
async def test_unused_client_created_before_a_fork_serves_both_processes(
    server: Process, connect: str, once: str
) -> None:
    assert await forked(server, connect, once) == ["child True", "status 0", "parent True"]
    async with heapline.connect(server.target) as hl:
        assert (await hl.stats("jobs")).ready == 2


@pytest.mark.parametrize(("connect", "once"), WAYS)
async def test_client_used_before_a_fork_serves_both_processes(server: Process, connect: str, once: str) -> None:
    assert await forked(server, connect, once, "used") == ["child True", "status 0", "parent True"]
    async with heapline.connect(server.target) as hl:
        assert (await hl.stats("jobs")).ready == 3


CHILDREN = """
import os, heapline
hl = heapline.connect_sync({target!r}, deadline=20)
hl.enqueue("jobs", b"x")
ended = []
for _ in range(20):
    child = os.fork()
    if not child:
        [dict(n=n) for n in range(1000)]
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1])
print(ended, flush=True)
hl.enqueue("jobs", b"x")
os._exit(0)
"""


async def test_forked_children_do_not_crash_if_they_do_not_use_the_client(server: Process) -> None:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILDREN.format(target=server.target), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1])},
    )  # fmt: skip
    received, _ = await asyncio.wait_for(run.communicate(), 120)
    assert received.decode().strip() == str([0] * 20)
    assert run.returncode == 0


POOL = """
import asyncio, multiprocessing, os, sys, heapline
os.environ["HEAPLINE_URL"] = {target!r}
app = heapline.App()
blocking = heapline.connect_sync({target!r}, deadline=20)
awaited = heapline.connect({target!r}, deadline=20)

@app.task(topic="jobs")
def work(n: int) -> None: ...

async def enqueue(n):
    await awaited.enqueue("jobs", b"%d" % n)

def use(n):
    try:
        asyncio.run(enqueue(n))
        blocking.enqueue("jobs", b"%d" % n)
        work.enqueue_sync(n)
        return os.getpid()
    except heapline.HeaplineError as error:
        return f"{{type(error).__name__}}: {{error}}"

if "used" in sys.argv:
    use(1000)
with multiprocessing.get_context("fork").Pool(3) as pool:
    found = pool.map(use, range(30), chunksize=1)
    print(*set(found), sep="\\n", flush=True)
print("parent", type(use(2000)).__name__, flush=True)
os._exit(0)
"""


async def pooled(server: Process, *arguments: str) -> list[str]:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", POOL.format(target=server.target), *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(heapline.__file__).parents[1])},
    )  # fmt: skip
    received, _ = await asyncio.wait_for(run.communicate(), 120)
    return received.decode().splitlines()


@pytest.mark.parametrize("used", [(), ("used",)])
async def test_pool_of_forked_processes_uses_clients_created_by_its_parent(
    server: Process, used: tuple[str, ...]
) -> None:
    *children, parent = await pooled(server, *used)
    assert all(child.isdecimal() for child in children), children
    assert parent == "parent int"
    async with heapline.connect(server.target) as hl:
        found = Counter(m.payload for m in await hl.pop("jobs", 1000))
    numbers = [*range(30), 2000, *([1000] if used else [])]
    assert found == Counter({b"%d" % n: 2 for n in numbers} | {b'{"n":%d}' % n: 1 for n in numbers})


# -- threads -----------------------------------------------------------------------------------------------------------


async def test_threads_share_one_blocking_client(server: Process) -> None:
    acked: list[bytes] = []

    def work(hl: heapline.client.sync.SyncClient, name: int) -> None:
        for number in range(20):
            hl.enqueue("jobs", b"%d-%d" % (name, number))
            for message in hl.pop("jobs", wait=30):
                message.ack()
                acked.append(message.payload)

    def all_of_them() -> None:
        with heapline.connect_sync(server.target) as hl:
            threads = [threading.Thread(target=work, args=(hl, name)) for name in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert hl.stats("jobs").ready == 0

    await asyncio.to_thread(all_of_them)
    assert sorted(acked) == sorted(b"%d-%d" % (name, number) for name in range(16) for number in range(20))


async def test_blocking_client_has_the_whole_contract_and_consumes(server: Process) -> None:
    def blocking() -> None:
        hl = heapline.connect_sync(server.target)
        assert hl.create_topic("mail", **SMALL).name == "mail"
        hl.enqueue_batch("mail", [heapline.Outgoing(b"%d" % i, priority=i) for i in range(5)])
        got = []
        for message in hl.consume("mail", prefetch=2):
            got.append(message.payload)
            message.ack()
            if len(got) == 3:
                break
        assert got == [b"0", b"1", b"2"]
        stats = hl.within(5).stats("mail")
        assert (stats.ready, stats.leased) == (2, 0)
        for batch in hl.consume_batches("mail", 10):
            assert batch.payloads == [b"3", b"4"]
            batch[0].ack()
            batch[1:].ack()
            break
        assert hl.stats("mail").acked_total == 5
        assert [frame.topic for frame in hl.read_log("mail")][:1] == ["mail"]
        hl.close()
        hl.close()
        with pytest.raises(Closed):
            hl.list_topics()

    await asyncio.to_thread(blocking)


async def test_tasks_are_enqueued_from_threads_without_a_loop(server: Process) -> None:
    app = heapline.App(server.target)

    @app.task(topic="jobs")
    def work(n: int) -> None: ...

    def enqueue(start: int) -> list[int]:
        first = [work.enqueue_sync(n).id for n in range(start, start + 10)]
        return first + [r.id for r in work.enqueue_many_sync(range(start + 10, start + 15))]

    ids = await asyncio.gather(*(asyncio.to_thread(enqueue, 100 * name) for name in range(16)))
    assert len({id for some in ids for id in some}) == 16 * 15
    async with heapline.connect(server.target) as hl:
        found = sorted(m.json()["n"] for m in await hl.pop("jobs", 1000))
    assert found == sorted(100 * name + n for name in range(16) for n in range(15))
    await app.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # asyncio's warnings about connections that their loop left open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_app_used_from_one_loop_per_call_does_not_accumulate_connections(server: Process) -> None:
    """Like asgiref's async_to_sync in Django."""
    async with Proxy(server.target) as proxy:

        async def use() -> None:
            app = heapline.App(proxy.target)

            @app.task(topic="jobs")
            def work(n: int) -> None: ...

            def call(n: int) -> None:
                asyncio.run(work.enqueue(n))

            for n in range(12):
                await asyncio.to_thread(call, n)
            await until(few)

        async def few() -> bool:
            gc.collect()
            return proxy.connections <= 2

        await use()
        gc.collect()  # the last connection too, here, where the warning is expected
