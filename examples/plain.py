"""A queue in a directory, without a server: `python examples/plain.py`.

A message is on disk when `enqueue` returns. A popped message is leased: if this process died before `ack`, the message
would be redelivered. To use a server, write `heapline.connect("localhost:7400")` instead of `heapline.open`.
"""

import asyncio

import heapline


async def main() -> None:
    async with heapline.open("data") as hl:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"write the report", priority=5)
        await hl.enqueue("jobs", b"put out the fire", priority=1)
        await hl.enqueue("jobs", b"water the plants", delay=0.5)

        while messages := await hl.pop("jobs", wait=1.0):
            for m in messages:
                print(m.payload.decode())
                await m.ack()


if __name__ == "__main__":
    asyncio.run(main())
