-- name: begin
BEGIN; SELECT pg_advisory_xact_lock_shared({rings});

-- name: begin_locked
-- In this order: while the transaction waits for its topic, the rings can turn.
BEGIN; SELECT pg_advisory_xact_lock({lock}); SELECT pg_advisory_xact_lock_shared({rings});

-- name: lock_rings
SELECT pg_advisory_xact_lock_shared({rings});

-- name: begin_shared
-- With others that share the topic, and alone with the other locks, which are in ascending order.
BEGIN; SELECT pg_advisory_xact_lock_shared({topic}); SELECT pg_advisory_xact_lock(n) FROM unnest(ARRAY[{others}]::bigint[]) AS n;
SELECT pg_advisory_xact_lock_shared({rings});

-- name: begin_alone
BEGIN; SET LOCAL lock_timeout = '50ms'; SELECT pg_advisory_xact_lock({rings});

-- name: commit
COMMIT;

-- name: rollback
ROLLBACK;

-- name: now
SELECT clock_ms() AS now, (SELECT last_value FROM ready_turn) AS ready_turn,
       (SELECT last_value FROM lease_turn) AS lease_turn, (SELECT last_value FROM ready_live) AS ready_live,
       (SELECT last_value FROM cold_turn) AS cold_turn;

-- name: enter_topic
SELECT id, config, id_suffix, paused, paused_until, clock_ms() AS now,
       (SELECT last_value FROM ready_turn) AS ready_turn, (SELECT last_value FROM lease_turn) AS lease_turn,
       (SELECT last_value FROM ready_live) AS ready_live, (SELECT last_value FROM cold_turn) AS cold_turn,
       (SELECT until FROM nodes WHERE node = $3 AND owner = $4) AS node_until
FROM topics WHERE namespace = $1 AND name = $2;

-- name: insert_topic
INSERT INTO topics (namespace, name, config, id_suffix) VALUES ($1, $2, $3, $4) RETURNING id;

-- name: update_config
UPDATE topics SET config = $2 WHERE id = $1;

-- name: update_pause
UPDATE topics SET paused = $2, paused_until = $3 WHERE id = $1;

-- name: list_topics
SELECT id, namespace, name, config, id_suffix FROM topics;

-- name: topics_by_id
SELECT id, namespace, name, config, id_suffix, paused, paused_until FROM topics WHERE id = ANY($1);

-- name: topics_by_name
SELECT t.id, namespace, name, t.config, t.id_suffix, t.paused, t.paused_until
FROM unnest($1::text[], $2::text[]) AS u(namespace, name) JOIN topics AS t USING (namespace, name);

-- name: delete_topic
DELETE FROM topics WHERE id = $1;

-- name: delete_ready_of_topic
DELETE FROM ready WHERE topic = $1;

-- name: delete_delayed_of_topic
DELETE FROM delayed WHERE topic = $1;

-- name: delete_leases_of_topic
DELETE FROM lease WHERE topic = $1;

-- name: delete_dead_of_topic
DELETE FROM dead WHERE topic = $1;

-- name: delete_keys_of_topic
DELETE FROM idempotency_keys WHERE topic = $1;

-- name: delete_producers_of_topic
DELETE FROM producers WHERE topic = $1;

-- name: delete_sequences_of_topic
DELETE FROM sequences WHERE topic = $1;

-- name: count_backlog
SELECT (SELECT coalesce(sum(ready + delayed), 0)::bigint FROM counts WHERE topic = $1)
     + (SELECT coalesce(sum(messages), 0)::bigint FROM prepared WHERE topic = $1);

-- name: count_leases
SELECT coalesce(sum(leased), 0)::bigint FROM counts WHERE topic = $1;

-- name: count_leases_of_holder
SELECT count(*) FROM (SELECT FROM lease WHERE topic = $1 AND holder = $2 LIMIT $3) AS held;

-- name: has_ready
SELECT EXISTS (SELECT FROM ready WHERE topic = $1 AND (expires IS NULL OR expires > $2));

-- name: topic_counts
SELECT coalesce(sum(ready), 0)::bigint AS ready, coalesce(sum(delayed), 0)::bigint AS delayed,
       coalesce(sum(leased), 0)::bigint AS leased, coalesce(sum(dead), 0)::bigint AS dead
FROM counts WHERE topic = $1;

-- name: oldest_ready
SELECT coalesce(min(id) FILTER (WHERE topic = $1), max(id)) FROM (SELECT topic, id FROM ready ORDER BY id LIMIT $2) AS first;

-- name: first_lease_end
SELECT coalesce(min(until) FILTER (WHERE topic = $1), max(until))
FROM (SELECT topic, until FROM lease ORDER BY until LIMIT $2) AS first;

-- name: depth_by_key
SELECT width_bucket(key, $2::bigint[]) AS bucket, count(*) AS count FROM (
    SELECT key FROM ready WHERE topic = $1 ORDER BY topic, key, due, id LIMIT $3) AS first GROUP BY 1;

-- name: sample_by_key
SELECT width_bucket(key, $2::bigint[]) AS bucket, count(*) AS count FROM ready TABLESAMPLE SYSTEM ($3)
WHERE topic = $1 GROUP BY 1;

-- name: depth_by_wake
SELECT width_bucket(wake - 1, $2::bigint[]) AS bucket, count(*) AS count FROM (
    SELECT wake FROM delayed WHERE topic = $1 ORDER BY topic, id LIMIT $3) AS first GROUP BY 1;

-- name: sample_by_wake
SELECT width_bucket(wake - 1, $2::bigint[]) AS bucket, count(*) AS count FROM delayed TABLESAMPLE SYSTEM ($3)
WHERE topic = $1 GROUP BY 1;
