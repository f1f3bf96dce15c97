-- Version 9: acked messages are remembered by token, one row for all that were acked together.

CREATE TABLE acked (
    slot smallint NOT NULL,       -- as in `ended`
    topic integer NOT NULL,
    token bigint NOT NULL,
    ids bigint[] NOT NULL,
    at bigint NOT NULL
) PARTITION BY LIST (slot);

DO $$
BEGIN
    FOR n IN 0..3 LOOP
        EXECUTE format('CREATE TABLE acked_%s PARTITION OF acked FOR VALUES IN (%s)
            WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE INDEX ON acked_%s (token)', n);
    END LOOP;
END $$;

INSERT INTO acked SELECT slot, topic, token, array_agg(id), max(at) FROM ended WHERE how = 'acked' GROUP BY slot, topic, token;
DELETE FROM ended WHERE how = 'acked';
ALTER TABLE ended DROP COLUMN token;
