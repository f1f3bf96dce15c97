-- Version 13: slots for a large backlog. They have no limit of size, so the ring of ready messages always turns.

CREATE SEQUENCE cold_turn MINVALUE 0 START 0;

DO $$
BEGIN
    FOR n IN 16..23 LOOP
        EXECUTE format('CREATE TABLE ready_%s PARTITION OF ready (PRIMARY KEY (id)) FOR VALUES IN (%s)
            WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE INDEX ON ready_%s (topic, key, due, id)', n);
        EXECUTE format('CREATE INDEX ON ready_%s (expires) WHERE expires IS NOT NULL', n);
    END LOOP;
END $$;
