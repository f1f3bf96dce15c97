-- name: begin_prepare
BEGIN; SELECT pg_advisory_xact_lock_shared({batch}); SELECT pg_advisory_xact_lock({topic});

-- name: begin_attach
BEGIN; SELECT pg_advisory_xact_lock({batch});

-- name: was_attached
SELECT EXISTS (SELECT FROM attached WHERE batch = $1);

-- name: insert_attached
INSERT INTO attached (batch, at) VALUES ($1, $2) ON CONFLICT DO NOTHING;

-- name: delete_attached
DELETE FROM attached WHERE batch = ANY($1);

-- name: delete_old_attached
DELETE FROM attached WHERE at < $1;

-- name: keys_in_doubt
SELECT hash, batch FROM prepared_keys WHERE topic = $1 AND hash = ANY($2) AND batch IS DISTINCT FROM $3;

-- name: sequences_in_doubt
SELECT seq, batch FROM prepared_sequences
WHERE topic = $1 AND producer = $2 AND epoch = $3 AND seq = ANY($4) AND batch IS DISTINCT FROM $5;

-- name: select_prepared
SELECT digest, results FROM prepared WHERE batch = $1 AND part = $2 AND topic = $3;

-- name: insert_prepared
INSERT INTO prepared (batch, part, topic, name, topics, digest, at, messages, producer, epoch, answered, results,
    content) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);

-- name: insert_prepared_keys
INSERT INTO prepared_keys (topic, batch, part, hash, id, print, scope, expires)
SELECT $1, $2, $3, * FROM unnest($4::bytea[], $5::bigint[], $6::bigint[], $7::smallint[], $8::bigint[]);

-- name: insert_prepared_sequences
INSERT INTO prepared_sequences (topic, batch, part, producer, epoch, seq, id, print)
SELECT $1, $2, $3, $4, $5, * FROM unnest($6::bigint[], $7::bigint[], $8::bigint[]);

-- name: count_prepared
SELECT coalesce(sum(messages), 0)::bigint FROM prepared WHERE topic = $1;

-- name: parts_of_batch
SELECT part, name, topics, messages, at FROM prepared WHERE batch = $1;

-- name: hold_parts
SELECT part, topic, name, producer, epoch, answered, content, coalesce((SELECT config FROM topics AS t WHERE t.id = topic), '{}') AS config
FROM prepared WHERE batch = $1 FOR UPDATE;

-- name: keys_of_batch
SELECT topic, hash, part, id, print FROM prepared_keys WHERE batch = $1 AND part = ANY($2);

-- name: sequences_of_batch
SELECT topic, producer, epoch, seq, part, id, print FROM prepared_sequences WHERE batch = $1 AND part = ANY($2);

-- name: delete_replaced_keys
DELETE FROM idempotency_keys k USING prepared_keys p
WHERE p.batch = $1 AND p.part = ANY($2) AND k.topic = p.topic AND k.hash = p.hash AND k.scope = 0 AND k.expires <= $3;

-- name: commit_keys
INSERT INTO idempotency_keys (topic, hash, id, print, scope, expires)
SELECT topic, hash, id, print, scope, expires FROM prepared_keys
WHERE batch = $1 AND part = ANY($2) AND id <> ALL($3::bigint[]);

-- name: commit_sequences
INSERT INTO sequences (slot, topic, producer, epoch, seq, id, print, at, answered)
SELECT last_value % 4, topic, producer, epoch, seq, id, print, $5, $6 FROM sequences_turn, prepared_sequences
WHERE batch = $1 AND part = $2 AND topic = $3 AND id <> ALL($4::bigint[]);

-- name: delete_prepared
DELETE FROM prepared WHERE batch = $1 RETURNING part;

-- name: delete_prepared_keys
DELETE FROM prepared_keys WHERE batch = $1;

-- name: delete_prepared_sequences
DELETE FROM prepared_sequences WHERE batch = $1;

-- name: delete_prepared_of_topic
DELETE FROM prepared WHERE topic = $1;

-- name: delete_prepared_keys_of_topic
DELETE FROM prepared_keys WHERE topic = $1;

-- name: delete_prepared_sequences_of_topic
DELETE FROM prepared_sequences WHERE topic = $1;

-- name: list_prepared
SELECT batch, part, name, messages, at FROM prepared;

-- name: prepared_batches
-- A page of them, the oldest first, after a time and a batch.
SELECT batch, max(at) AS at FROM prepared GROUP BY batch HAVING (max(at), batch) > ($1::bigint, $2::text)
ORDER BY 2, 1 LIMIT $3;

-- name: select_decided
SELECT batch, parts FROM decisions WHERE batch = ANY($1);

-- name: select_decision
SELECT parts, messages, topics FROM decisions WHERE batch = $1;

-- name: insert_decision
INSERT INTO decisions (batch, parts, messages, topics, sink, version, at) VALUES ($1, $2, $3, $4, $5, $6, $7);

-- name: delete_decision
DELETE FROM decisions WHERE batch = $1;

-- name: decisions_of_sink
SELECT batch FROM decisions WHERE sink = $1;

-- name: delete_decisions
DELETE FROM decisions WHERE batch = ANY($1) RETURNING batch;

-- name: delete_old_decisions
DELETE FROM decisions WHERE at < $1;

-- name: list_decisions
SELECT batch, parts, messages, at FROM decisions;

-- name: select_sink
SELECT version, messages FROM sinks WHERE name = $1;

-- name: upsert_sink
INSERT INTO sinks (name, version, batch, messages, topics, at) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (name) DO UPDATE SET version = excluded.version, batch = excluded.batch, messages = excluded.messages,
    topics = excluded.topics, at = excluded.at;

-- name: list_sinks
SELECT name, version, batch, messages, topics, at FROM sinks;

-- name: delete_sink
DELETE FROM sinks WHERE name = $1 RETURNING true;
