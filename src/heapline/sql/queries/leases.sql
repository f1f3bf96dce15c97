-- name: claim_candidates
(SELECT {slot}::smallint AS slot, ctid AS place, key, due, id, octet_length(payload) AS size FROM {ready}
  WHERE topic = $1 AND (key, due, id) > (($8::bigint[])[{slot} + 1], ($9::bigint[])[{slot} + 1], ($10::bigint[])[{slot} + 1])
    AND (expires IS NULL OR expires > $2) ORDER BY topic, key, due, id LIMIT $3)

-- name: take_candidates
(SELECT {slot}::smallint AS slot, ctid AS place, key, due, id, octet_length(payload) AS size FROM {ready}
  WHERE topic = $1 AND id = ANY ($11::bigint[]) AND (key, due, id) <= ($13, $14, $15)
    AND (expires IS NULL OR expires > $2) AND (SELECT ok FROM allowed))

-- name: take_allowed
-- Whether fewer than $12 messages are ready before the worst one that is to be taken, besides those that are taken too.
allowed AS MATERIALIZED (
    SELECT count(*) < $12 AS ok FROM (SELECT FROM ({better}) AS ahead LIMIT $12) AS counted_ahead
),

-- name: take_better
(SELECT FROM {ready} WHERE topic = $1 AND id <> ALL ($11::bigint[]) AND (key, due, id) < ($13, $14, $15)
    AND (key, due, id) > (($8::bigint[])[{slot} + 1], ($9::bigint[])[{slot} + 1], ($10::bigint[])[{slot} + 1])
  ORDER BY topic, key, due, id LIMIT $12)

-- name: best
SELECT key, due, id FROM ({candidates}) AS candidates ORDER BY key, due, id LIMIT $3;

-- name: best_candidates
(SELECT key, due, id FROM {ready}
  WHERE topic = $1 AND (key, due, id) > (($4::bigint[])[{slot} + 1], ($5::bigint[])[{slot} + 1], ($6::bigint[])[{slot} + 1])
    AND (expires IS NULL OR expires > $2) ORDER BY topic, key, due, id LIMIT $3)

-- name: claim_delete
from_{slot} AS (
    DELETE FROM {ready} WHERE ctid = ANY (ARRAY(SELECT place FROM best WHERE slot = {slot})) RETURNING *
)

-- name: claim
WITH {allowed}
best AS MATERIALIZED (
    SELECT slot, place FROM (
        SELECT slot, place, row_number() OVER ranked AS n, sum(size) OVER ranked AS bytes
        FROM ({candidates}) AS candidates
        WINDOW ranked AS (ORDER BY key, due, id ROWS UNBOUNDED PRECEDING)
    ) AS ranks WHERE n <= $3 AND (n = 1 OR bytes <= $4)
),
{deletes},
taken AS ({taken}),
freed AS (
    DELETE FROM idempotency_keys AS k USING taken AS t
    WHERE t.scope = 1 AND k.topic = t.topic AND k.hash = t.hash AND k.id = t.id
),
counted AS (
    INSERT INTO counts (slot, topic, ready, leased)
    SELECT (SELECT last_value % 4 FROM counts_turn), $1, -count(*), count(*) FROM taken HAVING count(*) > 0
),
-- The time is read here, after the messages were seen to be ready: a lease before this one had ended by then.
-- The token is random (50 bits): a sequence goes back with a failover that loses commits, and would repeat a lost lease's
-- token. With the slot it is below 2^53, so that JavaScript does not round it.
granted AS MATERIALIZED (
    SELECT last_value % {slots} AS slot, clock_ms() AS now,
           (uuid_hash_extended(gen_random_uuid(), 0) & ((1::bigint << 50) - 1)) * {slots} + last_value % {slots} AS token
    FROM lease_turn
)
INSERT INTO lease (slot, {columns}, token, holder, request, until, started)
SELECT slot, topic, id, key, due, priority, least(attempts + 1, 255), ttl, expires, max_retries, reason, name, headers,
       nullif(scope, 1), CASE WHEN scope = 2 THEN hash END, payload, token, $5, $6, now + $7, now
FROM taken, granted
RETURNING id, key, due, token, payload, priority, attempts, name, headers, until;

-- name: leases_of_request
SELECT id, key, due, token, payload, priority, attempts, name, headers, until FROM lease
WHERE topic = $1 AND request = $2;

-- name: ack
WITH home AS MATERIALIZED (SELECT id, config FROM topics WHERE namespace = $1 AND name = $2),
gone AS (
    DELETE FROM {lease} AS l USING unnest($3::bigint[], $4::bigint[]) AS u(id, token)
    WHERE l.id = u.id AND l.token = u.token AND l.topic = (SELECT id FROM home) RETURNING l.topic, l.id, l.token, l.hash
), kept AS (
    INSERT INTO acked (slot, topic, token, ids, at)
    SELECT clock_ms() / {period} % {slots}, min(topic), token, array_agg(id), clock_ms() FROM gone GROUP BY token
), freed AS (
    DELETE FROM idempotency_keys AS k USING gone AS g
    WHERE g.hash IS NOT NULL AND k.topic = g.topic AND k.hash = g.hash AND k.id = g.id
), recorded AS (
    INSERT INTO events (topic, kind, at, ids)
    SELECT g.topic, 'acked', clock_ms(), array_agg(g.id ORDER BY g.id) FROM gone AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, leased)
    SELECT (SELECT last_value % 4 FROM counts_turn), min(topic), -count(*) FROM gone HAVING count(*) > 0
)
SELECT home.id, home.config, (SELECT coalesce(array_agg(gone.id), ARRAY[]::bigint[]) FROM gone) AS acked FROM home;

-- name: was_acked
SELECT u.id FROM acked AS a JOIN unnest($2::bigint[], $3::bigint[]) AS u(id, token) ON a.token = u.token
WHERE a.topic = $1 AND u.id = ANY (a.ids);

-- name: hold_leases
SELECT l.id, l.attempts, l.max_retries, l.expires FROM {lease} AS l
JOIN unnest($2::bigint[], $3::bigint[]) AS u(id, token) ON l.id = u.id AND l.token = u.token
WHERE l.topic = $1 ORDER BY l.id FOR UPDATE OF l;

-- name: overdue_leases
SELECT slot, topic, id, attempts, max_retries, expires FROM lease
WHERE until <= $1 ORDER BY until LIMIT $2 FOR UPDATE SKIP LOCKED;

-- name: extend
UPDATE {lease} AS l SET until = greatest(l.until, least($4::bigint, l.started + $5::bigint))
FROM unnest($2::bigint[], $3::bigint[]) AS u(id, token)
WHERE l.id = u.id AND l.token = u.token AND l.topic = $1 RETURNING l.id, l.until;

-- name: lease_of
SELECT token, holder FROM lease WHERE topic = $1 AND id = $2;

-- name: lease_to_ready
WITH moved AS (DELETE FROM {lease} WHERE topic = $1 AND id = ANY($2) RETURNING *), counted AS (
    INSERT INTO counts (slot, topic, ready, leased) SELECT (SELECT last_value % 4 FROM counts_turn), $1, count(*), -count(*) FROM moved HAVING count(*) > 0
)
INSERT INTO {ready} (slot, {columns})
SELECT {slot}, topic, id, key, due, priority, attempts + $3::smallint, ttl, expires, max_retries, coalesce($4, reason), name,
       headers, scope, hash, payload FROM moved;

-- name: lease_to_delayed
WITH moved AS (
    DELETE FROM {lease} AS l USING unnest($2::bigint[], $3::bigint[]) AS u(id, wake)
    WHERE l.topic = $1 AND l.id = u.id RETURNING l.*, u.wake
), counted AS (
    INSERT INTO counts (slot, topic, delayed, leased) SELECT (SELECT last_value % 4 FROM counts_turn), $1, count(*), -count(*) FROM moved HAVING count(*) > 0
)
INSERT INTO delayed (slot, {columns}, wake, at)
SELECT delayed_slot(least(wake, expires), (SELECT clock_ms())), topic, id, key, due, priority, attempts, ttl, expires,
       max_retries, coalesce($4, reason), name, headers, scope, hash, payload, wake, least(wake, expires) FROM moved;

-- name: lease_to_dead
WITH moved AS (DELETE FROM {lease} WHERE topic = $1 AND id = ANY($2) RETURNING *), counted AS (
    INSERT INTO counts (slot, topic, dead, leased) SELECT (SELECT last_value % 4 FROM counts_turn), $1, count(*), -count(*) FROM moved HAVING count(*) > 0
)
INSERT INTO dead ({columns}, at)
SELECT topic, id, key, due, priority, attempts, ttl, expires, max_retries, $3, name, headers, scope, hash, payload, $4
FROM moved;

-- name: lease_to_ended
WITH gone AS (DELETE FROM {lease} WHERE topic = $1 AND id = ANY($2) RETURNING topic, id, hash),
freed AS (
    DELETE FROM idempotency_keys AS k USING gone AS g
    WHERE g.hash IS NOT NULL AND k.topic = g.topic AND k.hash = g.hash AND k.id = g.id
), counted AS (
    INSERT INTO counts (slot, topic, leased) SELECT (SELECT last_value % 4 FROM counts_turn), $1, -count(*) FROM gone HAVING count(*) > 0
)
INSERT INTO {ended} (slot, topic, id, how, reason, at) SELECT {slot}, topic, id, $3, $4, $5 FROM gone;
