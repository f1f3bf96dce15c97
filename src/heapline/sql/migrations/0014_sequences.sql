-- Version 14: producers' sequences in a ring of slots. A row also says how far its producer had all answers.
--
-- Rows are only inserted. A full slot is closed; what its producers still need is moved to the open slot, and
-- `answered_below` of these is raised then, once per slot instead of once per call.

CREATE SEQUENCE sequences_turn MINVALUE 0 START 0;
ALTER TABLE sequences RENAME TO old_sequences;

CREATE TABLE sequences (
    slot smallint NOT NULL,
    topic integer NOT NULL,
    producer text NOT NULL,
    epoch bigint NOT NULL,
    seq bigint NOT NULL,
    id bigint NOT NULL,
    print bigint NOT NULL,
    at bigint NOT NULL,
    answered bigint NOT NULL      -- the producer had all answers below this sequence
) PARTITION BY LIST (slot);

DO $$
BEGIN
    FOR n IN 0..3 LOOP
        EXECUTE format('CREATE TABLE sequences_%s PARTITION OF sequences (UNIQUE (topic, producer, epoch, seq))
            FOR VALUES IN (%s) WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE INDEX ON sequences_%s (topic, at)', n);
    END LOOP;
END $$;

INSERT INTO sequences SELECT 0, s.topic, s.producer, p.epoch, s.seq, s.id, s.print, s.at, p.answered_below
FROM old_sequences AS s JOIN producers AS p ON p.topic = s.topic AND p.name = s.producer;
DROP TABLE old_sequences;
