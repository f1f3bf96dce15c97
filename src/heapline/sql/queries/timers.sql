-- name: due_delayed
SELECT slot, ctid AS place, topic, coalesce(expires <= $2, false) AS expired FROM delayed
WHERE at > $1 AND at <= $2 ORDER BY at LIMIT $3 FOR UPDATE SKIP LOCKED;

-- name: delayed_to_ready
WITH moved AS (DELETE FROM {delayed} WHERE ctid = ANY($1::tid[]) RETURNING *), recorded AS (
    INSERT INTO events (topic, kind, at, ids)
    SELECT g.topic, 'fired', clock_ms(), array_agg(g.id ORDER BY g.id) FROM moved AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, ready, delayed) SELECT (SELECT last_value % 4 FROM counts_turn), topic, count(*), -count(*) FROM moved GROUP BY topic
)
INSERT INTO {ready} (slot, {columns}) SELECT {slot}, {columns} FROM moved;

-- name: delayed_to_ended
WITH gone AS (DELETE FROM {delayed} WHERE ctid = ANY($1::tid[]) RETURNING topic, id, hash),
freed AS (
    DELETE FROM idempotency_keys AS k USING gone AS g
    WHERE g.hash IS NOT NULL AND k.topic = g.topic AND k.hash = g.hash AND k.id = g.id
), recorded AS (
    INSERT INTO events (topic, kind, at, ids)
    SELECT g.topic, 'expired', $2, array_agg(g.id ORDER BY g.id) FROM gone AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, delayed) SELECT (SELECT last_value % 4 FROM counts_turn), topic, -count(*) FROM gone GROUP BY topic
)
INSERT INTO {ended} (slot, topic, id, how, at) SELECT {slot}, topic, id, 'expired', $2 FROM gone;

-- name: expire_ready
WITH gone AS (
    DELETE FROM ready WHERE expires <= $1 AND id = ANY (ARRAY(
        SELECT id FROM ready WHERE expires <= $1 ORDER BY expires LIMIT $2))
    RETURNING topic, id, hash
), freed AS (
    DELETE FROM idempotency_keys AS k USING gone AS g
    WHERE g.hash IS NOT NULL AND k.topic = g.topic AND k.hash = g.hash AND k.id = g.id
), kept AS (
    INSERT INTO {ended} (slot, topic, id, how, at) SELECT {slot}, topic, id, 'expired', $1 FROM gone
), recorded AS (
    INSERT INTO events (topic, kind, at, ids)
    SELECT g.topic, 'expired', $1, array_agg(g.id ORDER BY g.id) FROM gone AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, ready) SELECT (SELECT last_value % 4 FROM counts_turn), topic, -count(*) FROM gone GROUP BY topic
)
SELECT topic, count(*) AS count FROM gone GROUP BY topic;

-- name: next_deadline
SELECT least((SELECT min(at) FROM delayed WHERE at > $1), (SELECT min(until) FROM lease),
             (SELECT min(expires) FROM ready)) AS next;

-- name: delete_old_keys
DELETE FROM idempotency_keys WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM idempotency_keys WHERE scope = 0 AND expires <= $1 LIMIT $2));

-- name: old_sequences
SELECT t.id, s.producer, s.epoch, s.highest FROM topics AS t CROSS JOIN LATERAL (
    SELECT producer, epoch, max(seq) AS highest FROM sequences
    WHERE topic = t.id AND at <= $1 - ((t.config::json ->> 'dedup_window')::float8 * 1000)::bigint GROUP BY producer, epoch
) AS s;

-- name: forget_sequences
WITH forgotten AS (DELETE FROM sequences WHERE topic = $1 AND producer = $2 AND epoch = $3 AND seq <= $4)
UPDATE producers SET forgotten_below = greatest(forgotten_below, $4 + 1) WHERE topic = $1 AND name = $2 AND epoch = $3;

-- name: delete_passed_producers
DELETE FROM producers AS p WHERE p.name LIKE $1 AND p.used < $2
    AND NOT EXISTS (SELECT FROM sequences AS s WHERE s.topic = p.topic AND s.producer = p.name);

-- name: look
SELECT clock_ms() AS now, (SELECT last_value FROM ready_turn) AS ready_turn,
       (SELECT last_value FROM lease_turn) AS lease_turn, (SELECT last_value FROM ready_live) AS ready_live,
       (SELECT last_value FROM cold_turn) AS cold_turn, (SELECT last_value FROM counts_turn) AS counts_turn,
       (SELECT last_value FROM sequences_turn) AS sequences_turn, (SELECT count(*) FROM topics) AS topics,
       ARRAY({sizes}) AS sizes;

-- name: slot_sizes
-- Large payloads are in the table behind the slot, and cost little until they are read: they count for a 64th.
SELECT pg_relation_size(c.oid)
       + CASE c.reltoastrelid WHEN 0 THEN 0 ELSE pg_relation_size(c.reltoastrelid) / 64 END AS bytes
FROM unnest($1::text[]) WITH ORDINALITY AS t(name, n) JOIN pg_class AS c ON c.oid = name::regclass ORDER BY n;

-- name: turn_ring
SELECT setval($1::text::regclass, $2);

-- name: lock_slot
LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE;

-- name: short_lock_timeout
SET LOCAL lock_timeout = '50ms';

-- name: count_slot
SELECT count(*) FROM (SELECT FROM {table} LIMIT $1) AS rows;

-- name: move_survivors
INSERT INTO {target} (slot, {columns}) SELECT {slot}, {columns} FROM {source} WHERE topic IN (SELECT t.id FROM topics AS t);

-- name: slot_bytes
SELECT coalesce(sum(octet_length(payload)), 0)::bigint FROM (SELECT payload FROM {table} LIMIT $1) AS rows;

-- name: move_rows
-- At most $1 rows, until they have $2 bytes.
WITH moved AS (
    DELETE FROM {source} WHERE ctid = ANY (ARRAY(
        SELECT place FROM (
            SELECT place, sum(size) OVER (ROWS UNBOUNDED PRECEDING) - size AS before
            FROM (SELECT ctid AS place, octet_length(payload) AS size FROM {source} LIMIT $1) AS first
        ) AS sums WHERE before < $2)) RETURNING *
)
INSERT INTO {target} (slot, {columns}) SELECT {slot}, {columns} FROM moved;

-- name: fold_counts
INSERT INTO {target} (slot, topic, ready, delayed, leased, dead)
SELECT {slot}, topic, sum(ready), sum(delayed), sum(leased), sum(dead) FROM {source}
WHERE topic IN (SELECT t.id FROM topics AS t) GROUP BY topic;

-- name: fold_producers
UPDATE producers AS p SET answered_below = greatest(p.answered_below, s.answered), used = greatest(p.used, s.at)
FROM (SELECT topic, producer, epoch, max(answered) AS answered, max(at) AS at FROM {source} GROUP BY 1, 2, 3) AS s
WHERE p.topic = s.topic AND p.name = s.producer AND p.epoch = s.epoch;

-- name: move_unanswered
INSERT INTO {target} (slot, topic, producer, epoch, seq, id, print, at, answered)
SELECT {slot}, s.topic, s.producer, s.epoch, s.seq, s.id, s.print, s.at, s.answered FROM {source} AS s
JOIN producers AS p ON p.topic = s.topic AND p.name = s.producer AND p.epoch = s.epoch AND s.seq >= p.answered_below;

-- name: move_undue
WITH moved AS (
    DELETE FROM {delayed} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {delayed} WHERE at > $1 ORDER BY at LIMIT $2)) RETURNING *
)
INSERT INTO delayed (slot, {columns}, wake, at) SELECT delayed_slot(at, $1), {columns}, wake, at FROM moved;

-- name: last_removal
-- Rows are only inserted. The condition makes this one pass over the table, although the planner avoids scans.
SELECT at FROM {table} WHERE ctid >= '(0,0)' ORDER BY ctid DESC LIMIT 1;

-- name: truncate_slot
TRUNCATE {table};
