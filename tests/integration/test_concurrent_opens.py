"""Threads load topics at the same time, and msgspec crashes if two of them are the first to decode a type.

So all of Heapline's types are described at import. A process can be the first only once: each open is in a new one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import heapline
from heapline.contract import payload_codec

TOPICS = 50

# Modules are imported once; each child is a copy that has not decoded anything.
OPENS = """
import asyncio, os, sys, threading
import heapline, heapline.engine.broker
directory, opens = sys.argv[1], int(sys.argv[2])
async def load():
    async with heapline.open(directory):
        pass
for number in range(opens):
    assert threading.active_count() == 1
    child = os.fork()
    if not child:
        sys.setswitchinterval(1e-5)
        asyncio.run(load())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"open {number} ended with status {status}")
"""

# What msgspec has described is visible to the garbage collector.
DESCRIBES_LATE = """
import asyncio, gc, sys, msgspec
import heapline, heapline.engine.broker, heapline.wire.json
def described():
    kinds, found = [msgspec.Struct], set()
    while kinds:
        for kind in kinds.pop().__subclasses__():
            kinds.append(kind)
            if any(type(held).__name__ == "StructInfo" for held in gc.get_referents(kind)):
                found.add(f"{kind.__module__}.{kind.__qualname__}")
    return found
async def use(directory):
    async with heapline.open(directory) as hl:
        for message in await hl.pop("t0", 10):
            print(await hl.message_history("t0", message.id), file=sys.stderr)
            await hl.ack(message)
        await hl.snapshot("t0")
        await hl.update_topic("t1", retention=60.0)
        print(await hl.list_schedules(), await hl.list_groups("t0"), file=sys.stderr)
before = described()
assert "heapline.journal.snapshot.Manifest" in before, before
asyncio.run(use(sys.argv[1]))
print(*sorted(described() - before))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("topics")
    with heapline.open_sync(path) as hl:
        for number in range(TOPICS):
            hl.create_topic(f"t{number}")
            hl.enqueue(f"t{number}", b"x")
            hl.create_group(f"t{number}", "readers")
            hl.snapshot(f"t{number}")
        hl.create_schedule("nightly", topic="t0", every=3600)
    return path


def run(program: str, *arguments: Any) -> str:
    command = [sys.executable, "-X", "faulthandler", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_no_type_is_described_after_import(directory: Path) -> None:
    assert run(DESCRIBES_LATE, directory).split() == []


@pytest.mark.slow
@pytest.mark.parametrize("fifty", range(20))
def test_thousand_fresh_opens_end_without_a_signal(directory: Path, fifty: int) -> None:
    run(OPENS, directory, 50)


@pytest.mark.soak
def test_ten_thousand_fresh_opens_end_without_a_signal(directory: Path) -> None:
    run(OPENS, directory, 10_000)


def test_threads_build_decoders_of_a_program_s_type_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    building, most = [0], [0]
    meet = threading.Barrier(4)
    build = msgspec.json.Decoder

    def counted(*args: Any, **more: Any) -> Any:
        building[0] += 1
        most[0] = max(most[0], building[0])
        threading.Event().wait(0.01)  # so that the others arrive
        building[0] -= 1
        return build(*args, **more)

    def decode(_: int) -> Any:
        meet.wait()
        return payload_codec.decode(b"[1]", None, list[int])

    monkeypatch.setattr(msgspec.json, "Decoder", counted)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(decode, range(4))) == [[1]] * 4
    assert most == [1]
