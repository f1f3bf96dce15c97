-- Version 3: delayed messages in slots by the time at which they become due or expire (delayed.py).
--
-- The slots of a level have one period each: a minute, 4 minutes, 16 minutes, … 45 days. A slot is truncated after its
-- period, so nothing relies on vacuum. Rows are never updated.

CREATE FUNCTION delayed_slot(at bigint, now bigint) RETURNS smallint LANGUAGE sql IMMUTABLE RETURN (
    CASE
        WHEN at / 60000 - now / 60000 < 3 THEN at / 60000 % 4
        WHEN at / 240000 - now / 240000 < 3 THEN 4 + at / 240000 % 4
        WHEN at / 960000 - now / 960000 < 3 THEN 8 + at / 960000 % 4
        WHEN at / 3840000 - now / 3840000 < 3 THEN 12 + at / 3840000 % 4
        WHEN at / 15360000 - now / 15360000 < 3 THEN 16 + at / 15360000 % 4
        WHEN at / 61440000 - now / 61440000 < 3 THEN 20 + at / 61440000 % 4
        WHEN at / 245760000 - now / 245760000 < 3 THEN 24 + at / 245760000 % 4
        WHEN at / 983040000 - now / 983040000 < 3 THEN 28 + at / 983040000 % 4
        WHEN at / 3932160000 - now / 3932160000 < 3 THEN 32 + at / 3932160000 % 4
        ELSE 32 + (now / 3932160000 + 2) % 4
    END
)::smallint;

DROP VIEW items;
ALTER TABLE delayed RENAME TO old_delayed;

CREATE TABLE delayed (
    slot smallint NOT NULL,
    LIKE messages,
    wake bigint NOT NULL,         -- when it becomes ready
    at bigint NOT NULL            -- when it becomes ready or expires
) PARTITION BY LIST (slot);

DO $$
BEGIN
    FOR n IN 0..35 LOOP
        EXECUTE format('CREATE TABLE delayed_%s PARTITION OF delayed (UNIQUE (topic, id)) FOR VALUES IN (%s)
            WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE INDEX ON delayed_%s (at)', n);
    END LOOP;
END $$;

INSERT INTO delayed
SELECT delayed_slot(least(wake, expires), clock_ms()), *, least(wake, expires) FROM old_delayed;
DROP TABLE old_delayed;

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
