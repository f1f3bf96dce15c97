"""Workers that share the subjects of a NATS stream: `python examples/nats_workers.py [nats://host:port]`.

Each worker gets a stable id and some of the partitions, and has a JetStream consumer for each. When one stops, the
others continue where it left off. In production every worker is a process of its own; the code stays the same.
"""

import asyncio
import sys
from typing import Any

import nats

from heapline import assign

PARTITIONS = [assign.Partition((f"tool{t}", f"chamber{c}")) for t in range(4) for c in range(3)]
CONFIG = assign.Config(
    worker_id_max=9, cold_start_window="1s", planned_scale_window="500ms", heartbeat_interval="500ms",
    heartbeat_ttl="15s",  # NATS may take 4 to 9 s to elect a leader; a shorter lease would end meanwhile
    assignment=assign.AssignmentConfig(rebalance_cooldown="500ms"),
)  # fmt: skip


class Worker:
    def __init__(self, kv: assign.NatsKV, client: Any, done: asyncio.Queue[str]) -> None:
        self.done = done
        self.subscriptions = assign.SubscriptionHelper(
            client,
            assign.SubscriptionConfig(stream="work", subject_prefix="work"),
            holds=lambda p: self.manager.holds(p),
        )
        self.manager = assign.Manager(
            CONFIG, kv, assign.StaticSource(PARTITIONS), hooks=assign.Hooks(on_assignment_changed=self.changed)
        )

    async def changed(self, added: Any, removed: Any) -> None:
        await self.subscriptions.update_subscriptions(added, removed, self.handle)

    async def handle(self, partition: assign.Partition, message: Any) -> None:
        fence = self.manager.fence(partition)  # pass it to the systems you write to; they reject lower fences
        assert fence is not None
        self.done.put_nowait(message.data.decode())

    async def stop(self) -> None:
        await self.manager.stop()  # its hook drops all partitions first
        await self.subscriptions.close()


async def publish(client: Any, name: str, done: asyncio.Queue[str]) -> None:
    """Publish one message per partition and wait until all were handled."""
    awaited = {f"{name} of {partition.id}": partition for partition in PARTITIONS}
    for text, partition in awaited.items():
        await client.jetstream().publish(partition.subject("work"), text.encode())
    async with asyncio.timeout(60):
        while awaited:
            awaited.pop(await done.get(), None)
    print(f"{name}: {len(PARTITIONS)} messages handled")


async def main(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="work", subjects=["work.>"])
    done: asyncio.Queue[str] = asyncio.Queue()
    async with await assign.NatsKV.connect(url, bucket="workers") as kv:
        workers = [Worker(kv, client, done) for _ in range(3)]
        await asyncio.gather(*(worker.manager.start() for worker in workers))
        print("workers:", *sorted(worker.manager.worker_id for worker in workers))
        print("held:", sum(len(worker.manager.assignment.partitions) for worker in workers))
        await publish(client, "morning", done)
        await workers[0].stop()
        print("one worker has stopped")
        await publish(client, "evening", done)
        for worker in workers[1:]:
            await worker.stop()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222"))
