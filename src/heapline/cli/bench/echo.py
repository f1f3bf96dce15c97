"""A gRPC server that sends back what it gets, and nothing else: `python -m heapline.cli.bench.echo` prints its port."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from heapline.cli.bench.baselines import ECHO


async def serve() -> None:
    import grpc

    async def call(request: bytes, context: Any) -> bytes:
        return request

    service, _, method = ECHO.strip("/").rpartition("/")
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.unary_unary_rpc_method_handler(call)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)  # until whoever started this has gone
    await server.stop(None)


if __name__ == "__main__":
    from heapline.cli.bench.driving import run_loop

    run_loop(serve())
