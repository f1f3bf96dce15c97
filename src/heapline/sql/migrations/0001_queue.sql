-- Version 1: topics and their messages.
--
-- A message is in one of four places: ready, delayed, lease or dead. It changes state by moving from one to another.
-- Times are milliseconds since 1970, by the database's clock. `key` is what the smallest of is served first.
--
-- `ready`, `lease` and `ended` are rings of slots (layout.py). New rows go to a ring's open slot. Rows of `ready` and
-- `ended` are never updated. A slot is emptied by TRUNCATE, which leaves no dead rows, even if an old transaction holds
-- back vacuum.

CREATE FUNCTION clock_ms() RETURNS bigint LANGUAGE sql VOLATILE
    RETURN (extract(epoch FROM clock_timestamp()) * 1000)::bigint;

CREATE TABLE meta (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version integer NOT NULL,
    shard integer NOT NULL,       -- the index of this database
    shards integer NOT NULL       -- how many databases share the topics; cannot change
);

CREATE TABLE nodes (
    node smallint PRIMARY KEY,    -- the node's part of a message id, 0 to 1023
    owner uuid NOT NULL,          -- the process that leases it
    until bigint NOT NULL,        -- end of that lease; 0 after a clean stop
    last_id bigint NOT NULL       -- highest id minted, known after a clean stop
);

-- How often each ring was turned; the turn modulo the number of slots is the open slot. Sequences, because these are
-- overwritten in place: a row that is updated twice per second would leave thousands of dead versions per hour.
CREATE SEQUENCE ready_turn MINVALUE 0 START 0;
CREATE SEQUENCE lease_turn MINVALUE 0 START 0;

CREATE TABLE topics (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- never reused: the topic's incarnation
    namespace text NOT NULL,
    name text NOT NULL,
    config text NOT NULL,         -- JSON
    id_suffix bigint NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    paused_until bigint,          -- end of the pause; NULL: no end
    UNIQUE (namespace, name)
);

CREATE TABLE messages (           -- the columns that every place has; it holds no rows
    topic integer NOT NULL,
    id bigint NOT NULL,
    key bigint NOT NULL,          -- priority as an order, by the topic's mode and aging
    due bigint NOT NULL,          -- orders messages of the same key
    priority bigint NOT NULL,
    attempts smallint NOT NULL,   -- deliveries so far
    ttl bigint,                   -- milliseconds after `due`
    expires bigint,
    max_retries smallint,         -- NULL: the topic's default
    reason text,                  -- of the last failure
    name bytea,                   -- the message's key, UTF-8 (text cannot hold NUL)
    headers bytea,                -- msgpack
    scope smallint,               -- of its idempotency key, if the message holds that: 1 pending, 2 until_ack
    hash bytea,                   -- of that key
    payload bytea NOT NULL
);

CREATE TABLE ready (slot smallint NOT NULL, LIKE messages) PARTITION BY LIST (slot);

CREATE TABLE lease (
    slot smallint NOT NULL,
    LIKE messages,
    token bigint NOT NULL,        -- a serial number * 8 + slot
    holder bytea,                 -- UTF-8
    request bytea,                -- request id of the pop, UTF-8
    until bigint NOT NULL,
    started bigint NOT NULL
) PARTITION BY LIST (slot);

CREATE TABLE ended (              -- how messages were removed, and which acks may be repeated
    slot smallint NOT NULL,
    topic integer NOT NULL,
    id bigint NOT NULL,
    token bigint,
    how text NOT NULL,
    reason text,
    at bigint NOT NULL
) PARTITION BY LIST (slot);

DO $$
BEGIN
    FOR n IN 0..15 LOOP
        EXECUTE format('CREATE TABLE ready_%s PARTITION OF ready (PRIMARY KEY (id)) FOR VALUES IN (%s)
            WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE INDEX ON ready_%s (topic, key, due, id)', n);
        EXECUTE format('CREATE INDEX ON ready_%s (expires) WHERE expires IS NOT NULL', n);
    END LOOP;
    FOR n IN 0..7 LOOP
        EXECUTE format('CREATE TABLE lease_%s PARTITION OF lease (PRIMARY KEY (id)) FOR VALUES IN (%s)', n, n);
        EXECUTE format('CREATE INDEX ON lease_%s (until)', n);
        EXECUTE format('CREATE INDEX ON lease_%s (topic, request) WHERE request IS NOT NULL', n);
    END LOOP;
    FOR n IN 0..3 LOOP
        EXECUTE format('CREATE TABLE ended_%s PARTITION OF ended FOR VALUES IN (%s)
            WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE INDEX ON ended_%s (id)', n);
    END LOOP;
END $$;

CREATE SEQUENCE tokens CACHE 32;

CREATE TABLE delayed (
    LIKE messages,
    wake bigint NOT NULL,         -- when it becomes ready
    PRIMARY KEY (id)
);
CREATE INDEX ON delayed (wake);
CREATE INDEX ON delayed (topic, wake);
CREATE INDEX ON delayed (expires) WHERE expires IS NOT NULL;

CREATE TABLE dead (
    LIKE messages,
    at bigint NOT NULL,           -- when it became a dead letter
    PRIMARY KEY (id)
);
CREATE INDEX ON dead (topic, at, id);

CREATE TABLE idempotency_keys (
    topic integer NOT NULL,
    hash bytea NOT NULL,
    id bigint NOT NULL,           -- the first message with this key
    print bigint NOT NULL,        -- fingerprint of its payload
    scope smallint NOT NULL,      -- 0 window, 1 pending, 2 until_ack
    expires bigint NOT NULL,      -- end of the window; 0 for the other scopes
    PRIMARY KEY (topic, hash)
);
CREATE INDEX ON idempotency_keys (expires) WHERE scope = 0;

CREATE TABLE producers (
    topic integer NOT NULL,
    name text NOT NULL,
    epoch bigint NOT NULL,
    answered_below bigint NOT NULL DEFAULT 0,
    forgotten_below bigint NOT NULL DEFAULT 0,
    used bigint NOT NULL,
    PRIMARY KEY (topic, name)
);

CREATE TABLE sequences (
    topic integer NOT NULL,
    producer text NOT NULL,
    seq bigint NOT NULL,
    id bigint NOT NULL,
    print bigint NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (topic, producer, seq)
);
CREATE INDEX ON sequences (topic, at);

-- The seed's table, for inspection.
CREATE VIEW items AS
SELECT m.id, t.namespace, t.name AS topic, m.status, m.priority, m.payload,
       to_timestamp(m.deliver_after / 1000.0) AS deliver_after,
       to_timestamp(m.lease_until / 1000.0) AS lease_expires_at,
       to_timestamp(((m.id >> 22) + 1704067200000) / 1000.0) AS created_at
FROM (
    SELECT id, topic, 'ready' AS status, priority, payload, due AS deliver_after, NULL::bigint AS lease_until FROM ready
    UNION ALL SELECT id, topic, 'delayed', priority, payload, wake, NULL FROM delayed
    UNION ALL SELECT id, topic, 'leased', priority, payload, due, until FROM lease
    UNION ALL SELECT id, topic, 'dead', priority, payload, due, NULL FROM dead
) m JOIN topics t ON t.id = m.topic;
