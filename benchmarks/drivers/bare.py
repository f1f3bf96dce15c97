"""Drives the bare gRPC server with calls as large as ours and their answers: the floor under any durable queue."""

from __future__ import annotations

import grpc

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive
from benchmarks.server.bare_server import METHOD, SIZE

NUMBER = 8


async def work(job: Job, window: Window) -> Outcome:
    enqueue = request(job.batch * (len(PAYLOAD) + NUMBER), job.batch * NUMBER)
    pop = request(NUMBER, job.batch * (len(PAYLOAD) + 4 * NUMBER))
    ack = request(job.batch * 2 * NUMBER, 0)
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{job.port}", options=options) as channel:
        call = channel.unary_unary(METHOD)
        await call(ack)

        async def turn() -> int:
            await call(enqueue)
            if job.options.get("kind") != "enqueue":
                await call(pop)
                await call(ack)
            return job.batch

        return await window.measure(turn)


def request(bytes_in: int, bytes_out: int) -> bytes:
    return bytes_out.to_bytes(SIZE, "little") + bytes(bytes_in)


if __name__ == "__main__":
    drive(work)
