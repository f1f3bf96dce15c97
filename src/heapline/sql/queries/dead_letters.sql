-- name: list_dead
SELECT 'dead' AS place, {columns}, NULL::bigint AS wake, NULL::bytea AS holder, NULL::bigint AS until, at
FROM dead WHERE topic = $1 AND (at, id) > ($2, $3) ORDER BY topic, at, id LIMIT $4;

-- name: dead_facts
SELECT id, at, priority, reason, name FROM dead
WHERE topic = $1 AND (at, id) > ($2, $3) ORDER BY topic, at, id LIMIT $4;

-- name: dead_facts_of
SELECT id, at, priority, reason, name FROM dead WHERE topic = $1 AND id = ANY($2);

-- name: dead_to_ready
WITH moved AS (DELETE FROM dead WHERE topic = $1 AND id = ANY($2) RETURNING *), kept AS (
    INSERT INTO {ready} (slot, {columns})
    SELECT {slot}, topic, id, key, due, priority, 0, ttl, $3::bigint + ttl, max_retries, NULL, name, headers, scope, hash,
           payload FROM moved
), recorded AS (
    INSERT INTO events (topic, kind, at, ids)
    SELECT g.topic, 'replayed', $3, array_agg(g.id ORDER BY g.id) FROM moved AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, ready, dead) SELECT (SELECT last_value % 4 FROM counts_turn), $1, count(*), -count(*) FROM moved HAVING count(*) > 0
)
SELECT count(*) FROM moved;

-- name: dead_to_delayed
WITH moved AS (
    DELETE FROM dead AS d USING unnest($2::bigint[], $3::bigint[]) AS u(id, wake)
    WHERE d.topic = $1 AND d.id = u.id RETURNING d.*, u.wake
), kept AS (
    INSERT INTO delayed (slot, {columns}, wake, at)
    SELECT delayed_slot(wake, (SELECT clock_ms())), topic, id, key, due, priority, 0, ttl, wake + ttl, max_retries, NULL,
           name, headers, scope, hash, payload, wake, wake
    FROM moved
), recorded AS (
    INSERT INTO events (topic, kind, at, ids, dues)
    SELECT g.topic, 'replayed', clock_ms(), array_agg(g.id ORDER BY g.id), array_agg(g.wake ORDER BY g.id) FROM moved AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, delayed, dead) SELECT (SELECT last_value % 4 FROM counts_turn), $1, count(*), -count(*) FROM moved HAVING count(*) > 0
)
SELECT count(*) FROM moved;

-- name: dead_to_ended
WITH gone AS (DELETE FROM dead WHERE topic = $1 AND id = ANY($2) AND at <= $4 RETURNING topic, id, hash, reason),
freed AS (
    DELETE FROM idempotency_keys AS k USING gone AS g
    WHERE g.hash IS NOT NULL AND k.topic = g.topic AND k.hash = g.hash AND k.id = g.id
), kept AS (
    INSERT INTO {ended} (slot, topic, id, how, reason, at) SELECT {slot}, topic, id, 'deleted', reason, $3 FROM gone
), recorded AS (
    INSERT INTO events (topic, kind, at, ids)
    SELECT g.topic, 'dead_deleted', $3, array_agg(g.id ORDER BY g.id) FROM gone AS g JOIN topics AS t ON t.id = g.topic AND t.keeps GROUP BY g.topic
), counted AS (
    INSERT INTO counts (slot, topic, dead) SELECT (SELECT last_value % 4 FROM counts_turn), $1, -count(*) FROM gone HAVING count(*) > 0
)
SELECT count(*) FROM gone;

-- name: outdated_dead
SELECT kept.topic, kept.namespace, kept.name, array_agg(outdated.id) AS ids, max(outdated.at) AS last
FROM (
    SELECT t.id AS topic, t.namespace, t.name, sum(c.dead)::bigint AS letters,
           (1000 * coalesce((t.config::json ->> 'dlq_retention')::float8, $3))::bigint AS ms,
           coalesce((t.config::json ->> 'dlq_max_letters')::bigint, 0) AS most
    FROM topics AS t JOIN counts AS c ON c.topic = t.id GROUP BY t.id HAVING sum(c.dead) > 0
) AS kept CROSS JOIN LATERAL (
    (SELECT id, at FROM dead WHERE topic = kept.topic AND kept.ms > 0 AND at <= $1 - kept.ms ORDER BY topic, at, id LIMIT $2)
    UNION
    (SELECT id, at FROM dead WHERE topic = kept.topic ORDER BY topic, at, id
     LIMIT CASE WHEN kept.most > 0 THEN least($2, greatest(0, kept.letters - kept.most)) ELSE 0 END)
) AS outdated
GROUP BY kept.topic, kept.namespace, kept.name;
