-- name: select_document
SELECT version, CASE WHEN version <> $2 THEN content END AS content FROM documents WHERE name = $1;

-- name: lock_until_commit
SELECT pg_advisory_xact_lock($1);

-- name: upsert_document
-- The version is the time in microseconds: higher than any before, even those that a restored backup has forgotten.
INSERT INTO documents (name, version, content)
VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, $2)
ON CONFLICT (name) DO UPDATE
SET version = greatest(documents.version + 1, excluded.version), content = excluded.content
RETURNING version;

-- name: notify_document
-- In the transaction of the change, which must be durable; so not the statement that wakes pops.
SELECT pg_notify($1, $2);
