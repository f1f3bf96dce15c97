"""Drives a queue on Redis: one script call for each batch enqueued, leased or acked."""

from __future__ import annotations

import itertools

from redis.asyncio import Redis

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities

LEASE_MS = 30_000
KEYS = ["{bench}:ready", "{bench}:leased", "{bench}:payloads", "{bench}:last"]

#: Lowest priority first, then the order of arrival; both fit into the 53 bits of a score.
ENQUEUE = """
local first = redis.call('INCRBY', KEYS[4], #ARGV / 2) - #ARGV / 2
local ready, payloads = {}, {}
for i = 1, #ARGV, 2 do
  local id = first + (i + 1) / 2
  ready[i], ready[i + 1] = ARGV[i] * 4294967296 + id % 4294967296, id
  payloads[i], payloads[i + 1] = id, ARGV[i + 1]
end
redis.call('ZADD', KEYS[1], unpack(ready))
redis.call('HSET', KEYS[3], unpack(payloads))
return #ARGV / 2
"""
LEASE = """
local popped = redis.call('ZPOPMIN', KEYS[1], ARGV[1])
if #popped == 0 then return {{}, {}} end
local now = redis.call('TIME')
local deadline = now[1] * 1000 + ARGV[2]
local ids, leased = {}, {}
for i = 1, #popped, 2 do
  ids[#ids + 1] = popped[i]
  leased[i], leased[i + 1] = deadline, popped[i]
end
redis.call('ZADD', KEYS[2], unpack(leased))
return {ids, redis.call('HMGET', KEYS[3], unpack(ids))}
"""
ACK = """
local done = redis.call('ZREM', KEYS[2], unpack(ARGV))
redis.call('HDEL', KEYS[3], unpack(ARGV))
return done
"""


async def work(job: Job, window: Window) -> Outcome:
    batches = itertools.cycle(
        [[part for p in priorities(job.batch, seed) for part in (p, PAYLOAD)] for seed in range(8)]
    )
    client = Redis(host="127.0.0.1", port=job.port, max_connections=job.in_flight)
    enqueue, lease, ack = (client.register_script(text) for text in (ENQUEUE, LEASE, ACK))

    async def turn() -> int:
        await enqueue(keys=KEYS, args=next(batches))
        ids, payloads = await lease(keys=KEYS, args=[job.batch, LEASE_MS])
        if ids and len(payloads[0]) != len(PAYLOAD):
            raise RuntimeError("redis returned another payload")
        return await ack(keys=KEYS, args=ids) if ids else 0

    try:
        return await window.measure(turn)
    finally:
        await client.aclose()


if __name__ == "__main__":
    drive(work)
