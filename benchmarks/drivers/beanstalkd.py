"""Drives beanstalkd over raw sockets: one connection per task, a batch of commands written before reading answers."""

from __future__ import annotations

import asyncio
import itertools

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities

LEASE_S = 30


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def lifecycle(self, puts: bytes, count: int) -> int:
        self._writer.write(puts)
        for _ in range(count):
            await self._answer(b"INSERTED")
        self._writer.write(b"reserve-with-timeout 0\r\n" * count)
        reserved = [id for id in [await self._reserved() for _ in range(count)] if id]
        self._writer.write(b"".join(b"delete %s\r\n" % id for id in reserved))
        for _ in reserved:
            await self._answer(b"DELETED")
        return len(reserved)

    async def _reserved(self) -> bytes | None:
        line = await self._reader.readline()
        if line == b"TIMED_OUT\r\n":
            return None
        kind, id, size = line.split()
        if kind != b"RESERVED":
            raise RuntimeError(f"beanstalkd says {line!r}")
        await self._reader.readexactly(int(size) + 2)
        return id

    async def _answer(self, wanted: bytes) -> None:
        line = await self._reader.readline()
        if not line.startswith(wanted):
            raise RuntimeError(f"beanstalkd says {line!r}")


async def work(job: Job, window: Window) -> Outcome:
    puts = itertools.cycle([puts_of(priorities(job.batch, seed)) for seed in range(8)])
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(job.in_flight):
        idle.put_nowait(Connection(*await asyncio.open_connection("127.0.0.1", job.port)))

    async def turn() -> int:
        connection = idle.get_nowait()
        done = await connection.lifecycle(next(puts), job.batch)
        idle.put_nowait(connection)
        return done

    return await window.measure(turn)


def puts_of(numbers: list[int]) -> bytes:
    return b"".join(b"put %d 0 %d %d\r\n%s\r\n" % (n, LEASE_S, len(PAYLOAD), PAYLOAD) for n in numbers)


if __name__ == "__main__":
    drive(work)
