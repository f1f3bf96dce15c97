-- name: record_event
INSERT INTO events (topic, kind, at, ids, priorities, dues, expires, max_retries, sizes, attempts, deadline, holder, reason, batch)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14);

-- name: last_event_number
SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS drawn, upto, sample_drawn, sample_transaction
FROM event_numbers, events_numbered;

-- name: keep_sample
UPDATE events_numbered SET sample_drawn = $1, sample_transaction = $2;

-- name: next_transaction
-- An id of its own: the xmax of a snapshot is only that of the last one that has ended.
SELECT pg_current_xact_id()::text::bigint;

-- name: oldest_transaction
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint;

-- name: number_events
WITH fresh AS MATERIALIZED (
    SELECT slot, seq, topic, cardinality(ids) AS count FROM events
    WHERE seq > (SELECT upto FROM events_numbered) AND seq <= $1 ORDER BY seq LIMIT $2
), placed AS MATERIALIZED (
    SELECT f.slot, f.seq, f.topic, f.count,
           coalesce(e.next, 0) + sum(f.count) OVER (PARTITION BY f.topic ORDER BY f.seq) - f.count AS first
    FROM fresh AS f JOIN topics AS t ON t.id = f.topic LEFT JOIN event_ends AS e ON e.topic = f.topic WHERE f.count > 0
), kept AS (
    INSERT INTO event_offsets (slot, topic, first, count, seq) SELECT slot, topic, first, count, seq FROM placed
), ends AS (
    INSERT INTO event_ends (topic, start, next) SELECT topic, 0, max(first + count) FROM placed GROUP BY topic
    ON CONFLICT (topic) DO UPDATE SET next = excluded.next
), moved AS (
    UPDATE events_numbered SET sample_drawn = NULL, sample_transaction = NULL, upto = greatest(
        upto, CASE WHEN (SELECT count(*) FROM fresh) < $2 THEN $1 ELSE (SELECT max(seq) FROM fresh) END)
)
SELECT count(*) FROM fresh;

-- name: event_bounds
SELECT start, next FROM event_ends WHERE topic = $1;

-- name: read_events
SELECT * FROM (
    SELECT *, row_number() OVER ordered AS n, sum(count) OVER ordered AS total FROM (
        SELECT o.first, o.count, e.* FROM event_offsets AS o JOIN events AS e ON e.slot = o.slot AND e.seq = o.seq
        WHERE o.topic = $1 AND o.first < $3 AND o.first >= coalesce(
            (SELECT p.first FROM event_offsets AS p WHERE p.topic = $1 AND p.first <= $2 ORDER BY p.topic DESC, p.first DESC LIMIT 1), $2)
        ORDER BY o.topic, o.first LIMIT $4
    ) AS page WINDOW ordered AS (ORDER BY first ROWS UNBOUNDED PRECEDING)
) AS ranks WHERE n = 1 OR total <= $5 ORDER BY n;

-- name: look_at_events
SELECT clock_ms() AS now, (SELECT last_value FROM events_turn) AS turn,
       (SELECT max((config::json ->> 'retention')::float8) FROM topics WHERE keeps) AS retention, ARRAY[{firsts}] AS firsts, ARRAY[{lasts}] AS lasts;

-- name: event_at
(SELECT at FROM {events} ORDER BY seq {order} LIMIT 1)

-- name: turn_events
SELECT setval('events_turn', $1);

-- name: raise_event_starts
UPDATE event_ends AS e SET start = greatest(e.start, o.upto)
FROM (SELECT topic, max(first + count) AS upto FROM {offsets} GROUP BY topic) AS o WHERE e.topic = o.topic;

-- name: delete_event_ends_of_topic
DELETE FROM event_ends WHERE topic = $1;
