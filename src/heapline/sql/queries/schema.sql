-- name: lock_migrations
SELECT pg_advisory_xact_lock(hashtextextended($1, 0));

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS {schema};

-- name: has_meta
SELECT to_regclass($1 || '.meta') IS NOT NULL;

-- name: select_meta
SELECT version, shard, shards FROM meta;

-- name: select_deployment
SELECT deployment FROM meta;

-- name: insert_meta
INSERT INTO meta (version, shard, shards) VALUES ($1, $2, $3);

-- name: update_version
UPDATE meta SET version = $1;

-- name: server_settings
SELECT current_setting('server_version') AS server_version, current_setting('fsync') AS fsync,
       current_setting('synchronous_commit') AS synchronous_commit, current_setting('in_hot_standby') AS standby;

-- name: notify
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, topic) FROM unnest($2::text[]) AS t(topic);
