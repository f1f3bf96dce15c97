-- name: insert_ready
WITH stored AS (
    INSERT INTO {ready} (slot, {columns})
    SELECT {slot}, $1, id, key, due, priority, 0, ttl, expires, max_retries, NULL, name, headers, scope, hash, payload
    FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::smallint[],
                $9::bytea[], $10::bytea[], $11::smallint[], $12::bytea[], $13::bytea[])
      AS m(id, key, due, priority, ttl, expires, max_retries, name, headers, scope, hash, payload)
), counted AS (
    INSERT INTO counts (slot, topic, ready) SELECT last_value % 4, $1, cardinality($2) FROM counts_turn
)
{taken};

-- name: insert_delayed
WITH stored AS (
    INSERT INTO delayed (slot, {columns}, wake, at)
    SELECT delayed_slot(due, (SELECT clock_ms())), $1, id, key, due, priority, 0, ttl, expires, max_retries, NULL, name,
           headers, scope, hash, payload, due, due
    FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::smallint[],
                $9::bytea[], $10::bytea[], $11::smallint[], $12::bytea[], $13::bytea[])
      AS m(id, key, due, priority, ttl, expires, max_retries, name, headers, scope, hash, payload)
), counted AS (
    INSERT INTO counts (slot, topic, delayed) SELECT last_value % 4, $1, cardinality($2) FROM counts_turn
)
{taken};

-- name: taken
SELECT id FROM {table} WHERE id = ANY({ids}::bigint[])

-- name: taken_delayed
SELECT id FROM delayed WHERE topic = ANY($1::integer[]) AND id = ANY($2::bigint[]);

-- name: select_keys
SELECT hash, id, print, scope, expires FROM idempotency_keys
WHERE topic = $1 AND hash = ANY($2) AND (scope > 0 OR expires > $3);

-- name: delete_expired_keys_of
DELETE FROM idempotency_keys WHERE topic = $1 AND hash = ANY($2) AND scope = 0 AND expires <= $3;

-- name: insert_keys
INSERT INTO idempotency_keys (topic, hash, id, print, scope, expires)
SELECT $1, * FROM unnest($2::bytea[], $3::bigint[], $4::bigint[], $5::smallint[], $6::bigint[]);

-- name: select_producer
SELECT epoch, greatest(answered_below, (
    SELECT answered FROM sequences AS s WHERE s.topic = p.topic AND s.producer = p.name AND s.epoch = p.epoch
    ORDER BY seq DESC LIMIT 1
)), forgotten_below FROM producers AS p WHERE topic = $1 AND name = $2;

-- name: upsert_producer
INSERT INTO producers (topic, name, epoch, answered_below, forgotten_below, used) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (topic, name) DO UPDATE SET epoch = excluded.epoch, answered_below = excluded.answered_below,
    forgotten_below = excluded.forgotten_below, used = excluded.used;

-- name: select_sequences
SELECT seq, id, print FROM sequences WHERE topic = $1 AND producer = $2 AND epoch = $3 AND seq = ANY($4);

-- name: insert_sequences
INSERT INTO sequences (slot, topic, producer, epoch, answered, at, seq, id, print)
SELECT last_value % 4, $1, $2, $3, $4, $5, seq, id, print
FROM sequences_turn, unnest($6::bigint[], $7::bigint[], $8::bigint[]) AS s(seq, id, print);
