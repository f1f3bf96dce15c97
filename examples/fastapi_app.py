"""Heapline in a FastAPI app: the broker is opened and closed by the lifespan, with a worker beside the requests.

    uvicorn examples.fastapi_app:app
    curl -X POST localhost:8000/orders -H 'content-type: application/json' -d '{"item": "tea", "express": true}'
    curl localhost:8000/stats

One process has a data directory open, so run one worker process of uvicorn; or talk to a server (`heapline serve`),
which any number of processes can.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from pydantic import BaseModel

import heapline


class Order(BaseModel):
    item: str
    express: bool = False


async def pack(hl: heapline.Broker, packed: list[str]) -> None:
    """The worker: packs one order after the other, the urgent ones first."""
    while True:
        for m in await hl.pop("orders", wait=30):
            order = Order.model_validate_json(m.payload)
            packed.append(order.item)
            await m.ack()


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with heapline.open(os.environ.get("ORDERS_DATA", "data")) as hl:
        await hl.create_topic("orders")
        app.state.hl, app.state.packed = hl, []
        worker = asyncio.create_task(pack(hl, app.state.packed))
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def take_order(order: Order, request: Request) -> dict[str, str]:
    hl: heapline.Broker = request.app.state.hl
    result = await hl.enqueue("orders", order.model_dump_json().encode(), priority=0 if order.express else 10)
    return {"message_id": result.message_id}


@app.get("/stats")
async def stats(request: Request) -> dict[str, int]:
    found = await request.app.state.hl.stats("orders")
    return {"ready": found.ready, "packed": len(request.app.state.packed)}
