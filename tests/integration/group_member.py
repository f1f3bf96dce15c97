"""One member of a group as a separate process: `python -m tests.integration.group_member TARGET NAME LOG SECONDS`.

Records each action before and after it, by the machine's monotonic clock, and works until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time

import heapline


async def main(target: str, name: str, log: str, ack_timeout: float) -> None:
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def note(what: str, *facts: object) -> None:
        os.write(file, (" ".join(map(str, (what, time.monotonic(), *facts))) + "\n").encode())

    async with heapline.connect(target) as hl:
        config = {"ack_timeout": ack_timeout, "member_lease": 1.0, "backoff": {"base": 0.1, "factor": 1.0}}
        async with hl.subscribe("jobs", group="g", member=name, credits=40, **config) as rows:
            note("ready")
            async for row in rows:
                note("got", row.partition, row.offset, row.attempts)
                await asyncio.sleep(random.uniform(0, 0.02))
                note("acking", row.partition, row.offset)
                try:
                    await row.ack()
                except heapline.DeliveryLost:
                    note("lost", row.partition, row.offset)
                else:
                    note("acked", row.partition, row.offset)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
