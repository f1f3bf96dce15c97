"""Drives a queue in one PostgreSQL table with hand-written SQL, one statement per batch."""

from __future__ import annotations

import itertools

import asyncpg

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities

CONNECTIONS = 4  # more only wait for one another: all read the head of the same index

TABLE = """
CREATE TABLE IF NOT EXISTS items (
  id bigserial PRIMARY KEY, topic text NOT NULL, priority int NOT NULL,
  deliver_after timestamptz NOT NULL DEFAULT now(), status smallint NOT NULL DEFAULT 0, lease_expires_at timestamptz,
  payload bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS items_ready ON items (topic, priority, deliver_after) WHERE status = 0;
"""
LEASE = """
WITH chosen AS (
  SELECT id FROM items WHERE topic = $1 AND status = 0 AND deliver_after <= now()
  ORDER BY priority, deliver_after LIMIT $2 FOR UPDATE SKIP LOCKED
)
UPDATE items SET status = 1, lease_expires_at = now() + interval '30 s' FROM chosen
WHERE items.id = chosen.id RETURNING items.id, items.priority, items.payload
"""
DELETE = "DELETE FROM items WHERE id = ANY($1) AND status = 1"


async def work(job: Job, window: Window) -> Outcome:
    batches = itertools.cycle([[("bench", p, PAYLOAD) for p in priorities(job.batch, seed)] for seed in range(8)])
    where = {"host": "127.0.0.1", "port": job.port, "user": "postgres", "database": "postgres"}
    async with asyncpg.create_pool(**where, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        await pool.execute(TABLE)

        async def enqueue() -> None:
            async with pool.acquire() as connection:
                columns = ["topic", "priority", "payload"]
                await connection.copy_records_to_table("items", records=next(batches), columns=columns)

        stored = await pool.fetchval("SELECT count(*) FROM items")
        for _ in range(stored, int(job.options.get("backlog", 0)), job.batch):
            await enqueue()

        async def turn() -> int:
            await enqueue()
            async with pool.acquire() as connection:
                leased = await connection.fetch(LEASE, "bench", job.batch)
            async with pool.acquire() as connection:
                await connection.execute(DELETE, [row["id"] for row in leased])
            return len(leased)

        return await window.measure(turn)


if __name__ == "__main__":
    drive(work)
