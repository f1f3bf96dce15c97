"""Drives the table of the MQueue design (its section 5.1): insert, lease by an update, delete; four connections."""

from __future__ import annotations

import itertools

import asyncpg

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive, priorities

CONNECTIONS = 4
DROP = "DROP TABLE IF EXISTS seed_items"
TABLE = """
CREATE TABLE IF NOT EXISTS seed_items (
  id bigint PRIMARY KEY, namespace text NOT NULL, topic text NOT NULL, status text NOT NULL, priority int NOT NULL,
  payload bytea, deliver_after timestamptz NOT NULL, lease_expires_at timestamptz, created_at timestamptz NOT NULL,
  idempotency_key text
);
CREATE INDEX IF NOT EXISTS seed_ready ON seed_items (namespace, topic, status, priority, deliver_after);
CREATE UNIQUE INDEX IF NOT EXISTS seed_keys ON seed_items (namespace, idempotency_key);
"""
INSERT = """
INSERT INTO seed_items (id, namespace, topic, status, priority, payload, deliver_after, created_at)
SELECT id, 'default', 'bench', 'ready', priority, payload, now(), now()
FROM unnest($1::bigint[], $2::int[], $3::bytea[]) AS m(id, priority, payload)
"""
LEASE = """
WITH chosen AS (
  SELECT id FROM seed_items
  WHERE namespace = 'default' AND topic = 'bench' AND status = 'ready' AND deliver_after <= now()
  ORDER BY priority ASC, deliver_after ASC LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE seed_items AS i SET status = 'leased', lease_expires_at = now() + interval '30 s' FROM chosen
WHERE i.id = chosen.id RETURNING i.id, i.priority, i.payload
"""
DELETE = "DELETE FROM seed_items WHERE id = ANY($1) AND status = 'leased'"


async def work(job: Job, window: Window) -> Outcome:
    batches = itertools.cycle([priorities(job.batch, seed) for seed in range(8)])
    where = {"host": "127.0.0.1", "port": job.port, "user": "postgres", "database": "postgres"}
    async with asyncpg.create_pool(**where, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        if not job.options.get("keep"):
            await pool.execute(DROP)
        await pool.execute(TABLE)
        stored, last = await pool.fetchrow("SELECT count(*), coalesce(max(id), 0) FROM seed_items")
        ids = itertools.count(last + 1)

        async def enqueue() -> None:
            new = [next(ids) for _ in range(job.batch)]
            await pool.execute(INSERT, new, next(batches), [PAYLOAD] * job.batch)

        async def turn() -> int:
            await enqueue()
            leased = await pool.fetch(LEASE, job.batch)
            await pool.execute(DELETE, [row["id"] for row in leased])
            return len(leased)

        for _ in range(stored, int(job.options.get("backlog", 0)), job.batch):
            await enqueue()
        return await window.measure(turn)


if __name__ == "__main__":
    drive(work)
