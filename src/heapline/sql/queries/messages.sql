-- name: locate
SELECT 'ready' AS place, {columns}, NULL::bigint AS wake, NULL::bytea AS holder, NULL::bigint AS until,
       NULL::bigint AS at FROM ready WHERE topic = $1 AND id = $2
UNION ALL SELECT 'delayed', {columns}, wake, NULL, NULL, NULL FROM delayed WHERE topic = $1 AND id = $2
UNION ALL SELECT 'leased', {columns}, NULL, holder, until, NULL FROM lease WHERE topic = $1 AND id = $2
UNION ALL SELECT 'dead', {columns}, NULL, NULL, NULL, at FROM dead WHERE topic = $1 AND id = $2;

-- name: select_ended
SELECT how, reason, at FROM ended WHERE topic = $1 AND id = $2 ORDER BY at DESC LIMIT 1;

-- name: select_acked
SELECT 'acked' AS how, NULL::text AS reason, at FROM acked WHERE topic = $1 AND $2::bigint = ANY (ids) LIMIT 1;

-- name: peek
SELECT * FROM (
    SELECT *, row_number() OVER ranked AS n, sum(octet_length(payload)) OVER ranked AS bytes FROM (
        SELECT 'ready' AS place, {columns}, NULL::bigint AS wake, NULL::bytea AS holder, NULL::bigint AS until,
               NULL::bigint AS at
        FROM ready WHERE topic = $1 AND (expires IS NULL OR expires > $2) AND (key, due, id) > ($3, $4, $5)
        ORDER BY topic, key, due, id LIMIT $6 + 1
    ) AS page WINDOW ranked AS (ORDER BY key, due, id ROWS UNBOUNDED PRECEDING)
) AS ranks WHERE n = 1 OR bytes <= $7 ORDER BY n;

-- name: cancel
WITH gone AS (DELETE FROM {source} WHERE topic = $1 AND id = $2 RETURNING topic, id, hash),
freed AS (
    DELETE FROM idempotency_keys AS k USING gone AS g
    WHERE g.hash IS NOT NULL AND k.topic = g.topic AND k.hash = g.hash AND k.id = g.id
), kept AS (
    INSERT INTO {ended} (slot, topic, id, how, at) SELECT {slot}, topic, id, 'cancelled', $3 FROM gone
), counted AS (
    INSERT INTO counts (slot, topic, {source}) SELECT (SELECT last_value % 4 FROM counts_turn), $1, -count(*) FROM gone HAVING count(*) > 0
)
SELECT count(*) FROM gone;

-- name: purge
WITH gone AS (DELETE FROM {source} WHERE topic = $1 RETURNING topic, id, hash),
freed AS (
    DELETE FROM idempotency_keys AS k USING gone AS g
    WHERE g.hash IS NOT NULL AND k.topic = g.topic AND k.hash = g.hash AND k.id = g.id
), kept AS (
    INSERT INTO {ended} (slot, topic, id, how, at) SELECT {slot}, topic, id, 'purged', $2 FROM gone
), recorded AS (
    INSERT INTO events (topic, kind, at, ids)
    SELECT g.topic, 'purged', $2, array_agg(g.id ORDER BY g.id) FROM gone AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, {source}) SELECT (SELECT last_value % 4 FROM counts_turn), $1, -count(*) FROM gone HAVING count(*) > 0
)
SELECT count(*) FROM gone;

-- name: reschedule_to_ready
WITH moved AS (DELETE FROM {source} WHERE topic = $1 AND id = $2 RETURNING *), kept AS (
    INSERT INTO {ready} (slot, {columns})
    SELECT {slot}, topic, id, $3, $4, $5, attempts, ttl, $6::bigint, max_retries, reason, name, headers, scope, hash, payload
    FROM moved
), taken AS (
    INSERT INTO counts (slot, topic, {source}) SELECT (SELECT last_value % 4 FROM counts_turn), $1, -1 FROM moved
), added AS (
    INSERT INTO counts (slot, topic, ready) SELECT (SELECT last_value % 4 FROM counts_turn), $1, 1 FROM moved
)
SELECT count(*) FROM moved;

-- name: reschedule_to_delayed
WITH moved AS (DELETE FROM {source} WHERE topic = $1 AND id = $2 RETURNING *), kept AS (
    INSERT INTO delayed (slot, {columns}, wake, at)
    SELECT delayed_slot(least($7::bigint, $6::bigint), (SELECT clock_ms())), topic, id, $3, $4, $5, attempts, ttl,
           $6::bigint, max_retries, reason, name, headers, scope, hash, payload, $7, least($7, $6)
    FROM moved
), taken AS (
    INSERT INTO counts (slot, topic, {source}) SELECT (SELECT last_value % 4 FROM counts_turn), $1, -1 FROM moved
), added AS (
    INSERT INTO counts (slot, topic, delayed) SELECT (SELECT last_value % 4 FROM counts_turn), $1, 1 FROM moved
)
SELECT count(*) FROM moved;
