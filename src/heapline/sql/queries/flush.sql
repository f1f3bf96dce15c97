-- name: enter_flush
SELECT coalesce((SELECT max(upto) FROM flushed WHERE wal = $1), 0) AS mark, clock_ms() AS now,
       (SELECT owner FROM wal_owners WHERE wal = $1) AS owner,
       (SELECT last_value FROM ready_turn) AS ready_turn, (SELECT last_value FROM lease_turn) AS lease_turn,
       (SELECT last_value FROM ready_live) AS ready_live, (SELECT last_value FROM cold_turn) AS cold_turn;

-- name: upsert_wal_owner
INSERT INTO wal_owners (wal, owner) VALUES ($1, $2) ON CONFLICT (wal) DO UPDATE SET owner = excluded.owner;

-- name: has_flushed
SELECT EXISTS (SELECT FROM flushed) OR EXISTS (SELECT FROM flushed_units);

-- name: insert_mark
INSERT INTO flushed (wal, upto, at) VALUES ($1, $2, $3);

-- name: delete_old_marks
DELETE FROM flushed WHERE wal = $1 AND upto < $2;

-- name: count_flushed
INSERT INTO counts (slot, topic, ready)
SELECT last_value % 4, topic, count FROM counts_turn, unnest($1::integer[], $2::bigint[]) AS t(topic, count);

-- name: flushed_units
SELECT id FROM flushed_units WHERE id = ANY($1::bigint[]);

-- name: insert_units
INSERT INTO flushed_units (id, at) SELECT id, $2 FROM unnest($1::bigint[]) AS t(id);

-- name: delete_old_units
DELETE FROM flushed_units WHERE at < $1 AND id <> ALL($2::bigint[]);
