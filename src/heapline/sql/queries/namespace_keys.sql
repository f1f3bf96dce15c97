-- name: claim_namespace_keys
INSERT INTO namespace_keys AS k (namespace, hash, topic, at, expires)
SELECT $1, hash, topic, $4, $5 FROM unnest($2::bytea[], $3::text[]) AS c(hash, topic)
ON CONFLICT (namespace, hash) DO UPDATE SET
    topic = CASE WHEN k.expires <= $4 THEN excluded.topic ELSE k.topic END,
    at = CASE WHEN k.expires <= $4 OR k.topic = excluded.topic THEN excluded.at ELSE k.at END,
    expires = CASE WHEN k.expires <= $4 THEN excluded.expires ELSE k.expires END
RETURNING hash, topic, at;

-- name: take_over_namespace_key
UPDATE namespace_keys SET topic = $5, at = $6 WHERE namespace = $1 AND hash = $2 AND topic = $3 AND at = $4
RETURNING true;

-- name: delete_old_namespace_keys
DELETE FROM namespace_keys WHERE ctid = ANY (ARRAY (SELECT ctid FROM namespace_keys WHERE expires <= $1 LIMIT $2));

-- name: select_keys_of_topic
SELECT k.hash, k.id, k.print, t.id_suffix, k.is_prepared FROM topics t JOIN LATERAL (
    SELECT hash, id, print, false AS is_prepared FROM idempotency_keys
    WHERE topic = t.id AND hash = ANY($3) AND (scope > 0 OR expires > clock_ms())
    UNION ALL SELECT hash, id, print, true FROM prepared_keys WHERE topic = t.id AND hash = ANY($3)
) AS k ON true
WHERE t.namespace = $1 AND t.name = $2;
