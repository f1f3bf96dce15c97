"""Heapline in a FastAPI app: requests enqueue tasks, and a worker in the same process runs them, urgent ones first.

    uvicorn examples.fastapi_app:web
    curl -X POST localhost:8000/orders -H 'content-type: application/json' -d '{"item": "tea", "express": true}'
    curl localhost:8000/stats

Without HEAPLINE_URL the queue is in ./data, which only one process can open, so run one worker process of uvicorn. With
a server (`heapline serve`) you can run any number of them, and separate workers for the tasks:
`heapline worker examples.fastapi_app:app`.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI
from pydantic import BaseModel

import heapline

app = heapline.App(os.environ.get("HEAPLINE_URL", "./data"))
packed: list[str] = []


class Order(BaseModel):
    item: str
    express: bool = False


@app.task(topic="orders", timeout=60)
async def pack(order: Order) -> None:
    packed.append(order.item)


@contextlib.asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    async with app:  # connects here, in the event loop of the requests
        worker = app.worker(concurrency=4)
        running = asyncio.create_task(worker.run())
        yield
        worker.stop()  # finishes what runs
        await running


web = FastAPI(lifespan=lifespan)


@web.post("/orders", status_code=202)
async def take_order(order: Order) -> dict[str, str]:
    done = await pack.enqueue(order, priority=0 if order.express else 10)
    return {"message_id": done.message_id}


@web.get("/stats")
async def stats() -> dict[str, int]:
    found = await (await app.broker()).stats("orders")
    return {"ready": found.ready, "packed": len(packed)}
