"""The recipe "how to add a call" in ARCHITECTURE.md, followed on a copy of the tree: four edits, every interface."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMMAND = '''

@call(id=0x17, rpc="CountWaiting", http="GET /v1/heaps/{topic}/waiting", needs=Right.CONSUME, audit=("state",))
class CountWaiting(Command[Count]):
    """Return how many messages are ready or delayed."""

    topic: Topic
    state: str | None = None
'''
METHOD = ("    cancel = command(messages.Cancel)\n", "    count_waiting = command(messages.CountWaiting, _count)\n")
HANDLER = """

@handles(messages.CountWaiting)
async def count_waiting(broker: TopicKeeper, command: messages.CountWaiting, context: Context) -> Count:
    held = [p.entries for p in broker.runner(command.topic).loaded.topic.partitions]
    return Count(sum(getattr(e, command.state) if command.state else e.ready + e.delayed for e in held))
"""
RPC = "  rpc CountWaiting(CountWaitingRequest) returns (Count);\n"
MESSAGE = "\nmessage CountWaitingRequest {\n  string topic = 1;\n  optional string state = 2;\n}\n"

PROGRAM = """
import asyncio, inspect, sys
import heapline
from heapline.client.transports.http import HttpBroker
from heapline.contract.call import BY_RPC
from heapline.engine import EmbeddedBroker
from heapline.server.auth.principals import NoAuthGuard
from heapline.server.server import Server
from heapline.server.settings import ServerSettings
from heapline.wire.json import openapi
from tests.integration.raw_grpc import RawGrpc

async def main(path):
    async with EmbeddedBroker(path) as engine:
        await engine.create_topic("jobs")
        for delay in (None, None, 60.0):
            await engine.enqueue("jobs", b"x", delay=delay)
        assert await engine.count_waiting("jobs") == 3
        server = Server(engine, NoAuthGuard(), ServerSettings(port=0, grpc_port=0, http_port=0, stop_grace=1.0))
        await server.start()
        grpc, http = RawGrpc(f"127.0.0.1:{server.grpc_port}"), HttpBroker(f"http://127.0.0.1:{server.http_port}")
        for broker in (grpc, http, heapline.connect(f"127.0.0.1:{server.port}")):
            async with broker as hl:
                assert await hl.count_waiting("jobs") == 3
                assert await hl.count_waiting("jobs", state="delayed") == 1
        await server.stop()

asyncio.run(main(sys.argv[1]))
with heapline.open_sync(sys.argv[1]) as hl:
    assert hl.count_waiting("jobs", state="ready") == 2
    assert "ready or delayed" in hl.count_waiting.__doc__
    assert list(inspect.signature(hl.count_waiting).parameters) == ["topic", "state"]
assert "get" in openapi()["paths"]["/v1/heaps/{topic}/waiting"]
assert BY_RPC["CountWaiting"].facts.needs[0].right.value == "consume"
print("called everywhere")
"""


def insert_after(path: Path, anchor: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert anchor in source, f"{path.name} has no line {anchor!r}"
    path.write_text(source.replace(anchor, anchor + text, 1), encoding="utf-8")


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def test_call_added_by_four_edits_works_on_every_interface(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    for name in ("src", "proto", "hatch_build.py"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    package = tmp_path / "src" / "heapline"
    # 1. the command
    append(package / "contract" / "messages.py", COMMAND)
    insert_after(package / "contract" / "messages.py", "from heapline.contract.call import Command, ", "Count, ")
    # 2. its method
    insert_after(package / "contract" / "methods.py", *METHOD)
    # 3. its handler
    append(package / "engine" / "messages.py", HANDLER)
    insert_after(package / "engine" / "messages.py", "from heapline.contract.call import ", "Count, ")
    # 4. its lines in the proto
    proto = tmp_path / "proto" / "heapline" / "v1" / "heapline.proto"
    insert_after(proto, "service Heapline {\n", RPC)
    append(proto, MESSAGE)
    compiled = "from pathlib import Path; import hatch_build; hatch_build.compile_proto(Path('.'))"
    subprocess.run([sys.executable, "-c", compiled], cwd=tmp_path, check=True)

    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "data")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip() == "called everywhere"
