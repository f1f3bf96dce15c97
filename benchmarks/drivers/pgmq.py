"""Drives a table like pgmq's, with the statements of its functions send_batch, read and delete; four connections.

Its payloads are JSON, and it serves the oldest message, whatever its priority.
"""

from __future__ import annotations

import json

import asyncpg

from benchmarks.drivers.window import PAYLOAD, Job, Outcome, Window, drive

CONNECTIONS = 4
DROP = "DROP TABLE IF EXISTS q_bench"
TABLE = """
CREATE TABLE IF NOT EXISTS q_bench (
  msg_id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, read_ct int DEFAULT 0 NOT NULL,
  enqueued_at timestamptz DEFAULT now() NOT NULL, vt timestamptz NOT NULL, message jsonb, headers jsonb
);
CREATE INDEX IF NOT EXISTS q_bench_vt_idx ON q_bench (vt ASC);
"""
SEND = """
INSERT INTO q_bench (vt, message, headers)
SELECT clock_timestamp(), unnest($1::jsonb[]), unnest($2::jsonb[]) RETURNING msg_id
"""
READ = """
WITH cte AS (
  SELECT msg_id FROM q_bench WHERE vt <= clock_timestamp() ORDER BY msg_id ASC LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE q_bench m SET vt = clock_timestamp() + interval '30 s', read_ct = read_ct + 1
FROM cte WHERE m.msg_id = cte.msg_id RETURNING m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message, m.headers
"""
DELETE = "DELETE FROM q_bench WHERE msg_id = ANY($1) RETURNING msg_id"


async def work(job: Job, window: Window) -> Outcome:
    message = json.dumps(PAYLOAD.hex()[: len(PAYLOAD)])
    where = {"host": "127.0.0.1", "port": job.port, "user": "postgres", "database": "postgres"}
    async with asyncpg.create_pool(**where, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        if not job.options.get("keep"):
            await pool.execute(DROP)
        await pool.execute(TABLE)
        stored = await pool.fetchval("SELECT count(*) FROM q_bench")
        for _ in range(stored, int(job.options.get("backlog", 0)), job.batch):
            await pool.fetch(SEND, [message] * job.batch, [None] * job.batch)

        async def turn() -> int:
            await pool.fetch(SEND, [message] * job.batch, [None] * job.batch)
            leased = await pool.fetch(READ, job.batch)
            await pool.fetch(DELETE, [row["msg_id"] for row in leased])
            return len(leased)

        return await window.measure(turn)


if __name__ == "__main__":
    drive(work)
