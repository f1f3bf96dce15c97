"""A web application under gunicorn with --preload: imported once, forked into workers, each of which enqueues."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import heapline
from tests.integration.test_server_kill import Process

pytestmark = pytest.mark.slow
SOURCE = str(Path(heapline.__file__).parents[1])

WEB = """
import os
import heapline

app = heapline.App(topics={"jobs": {"segment_bytes": 1 << 20, "max_payload_bytes": 1 << 16}})
hl = heapline.connect_sync(os.environ["HEAPLINE_URL"], deadline=20)

@app.task(topic="jobs")
def work(pid: int) -> None: ...

if "USED_BEFORE" in os.environ:
    work.enqueue_sync(0)

def web(environ, start_response):
    try:
        work.enqueue_sync(os.getpid())
        hl.enqueue("jobs", b"%d" % os.getpid())
        said = str(os.getpid())
    except heapline.HeaplineError as error:
        said = f"{type(error).__name__}: {error}"
    start_response("200 OK", [("content-type", "text/plain")])
    return [said.encode()]
"""


@asynccontextmanager
async def gunicorn(home: Path, target: str, **environment: str) -> AsyncIterator[str]:
    """Yield its address while it runs."""
    (home / "web.py").write_text(WEB)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gunicorn", "web:web", "--preload", "--workers", "3", "--bind", "127.0.0.1:0",
        "--worker-tmp-dir", str(home), "--graceful-timeout", "5", cwd=home,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, *sys.path]), "HEAPLINE_URL": target, **environment},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    try:
        async with asyncio.timeout(60):
            while (found := re.search(r"Listening at: (http://\S+)", said)) is None:
                line = await process.stderr.readline()
                assert line, f"gunicorn ended:\n{said}"
                said += line.decode()
        reading = asyncio.ensure_future(process.stderr.read())  # otherwise its pipe would fill
        yield found[1]
        process.terminate()
        await asyncio.wait_for(process.wait(), 60)
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        said: str = answer.read().decode()
        return said


@pytest.mark.parametrize("used", [{}, {"USED_BEFORE": "1"}])
async def test_application_preloaded_by_gunicorn_enqueues_from_each_worker(
    tmp_path: Path, used: dict[str, str]
) -> None:
    async with Process(tmp_path / "data", "--insecure-everybody") as server:
        pids: list[str] = []
        async with gunicorn(tmp_path, server.target, **used) as address, asyncio.timeout(60):
            while len(set(pids)) < 2 or len(pids) < 12:  # the kernel decides which worker answers
                pids += await asyncio.gather(*(asyncio.to_thread(get, address) for _ in range(6)))
        assert all(pid.isdecimal() for pid in pids), pids
        async with heapline.connect(server.target) as hl:
            found = [m.payload for m in await hl.pop("jobs", 1000)]
        before = [b'{"pid":0}'] if used else []
        assert sorted(found) == sorted(before + [p.encode() for p in pids] + [b'{"pid":%s}' % p.encode() for p in pids])
