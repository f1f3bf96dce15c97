-- Version 17: what happened to the messages of topics with a `retention`, in a ring of slots (events.py).
--
-- A row is recorded by the transaction that changes the messages. `seq` follows cause and effect, but rows become visible
-- when their transactions commit. `event_offsets` has the place of each row in its topic's log, given when no row before
-- it can appear any more. Rows of both are only inserted, and slots are truncated.

ALTER TABLE topics ADD COLUMN keeps boolean GENERATED ALWAYS AS ((config::json ->> 'retention')::float8 > 0) STORED;

CREATE SEQUENCE events_turn MINVALUE 0 START 0;
CREATE SEQUENCE event_numbers;

CREATE FUNCTION event_slot() RETURNS smallint LANGUAGE sql VOLATILE
    RETURN (SELECT last_value % 8 FROM events_turn)::smallint;

-- The transaction has its id before it draws a number: whoever waits for the ids waits for the numbers.
CREATE FUNCTION next_event() RETURNS bigint LANGUAGE sql VOLATILE
    RETURN CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('event_numbers') END;

CREATE TABLE events (
    slot smallint NOT NULL DEFAULT event_slot(),
    seq bigint NOT NULL DEFAULT next_event(),
    topic integer NOT NULL,
    kind text NOT NULL,           -- as in the log broker's journal
    at bigint NOT NULL,
    ids bigint[] NOT NULL,
    priorities bigint[],          -- the columns below are one per id, or NULL
    dues bigint[],                -- 0: immediately
    expires bigint[],             -- 0: never
    max_retries smallint[],       -- -1: the topic's default
    sizes integer[],              -- of payloads
    attempts smallint[],
    deadline bigint,              -- of leases
    holder bytea,
    reason text,
    batch text
) PARTITION BY LIST (slot);

CREATE TABLE event_offsets (
    slot smallint NOT NULL,       -- as in `events`
    topic integer NOT NULL,
    first bigint NOT NULL,        -- offset of its first id
    count integer NOT NULL,
    seq bigint NOT NULL
) PARTITION BY LIST (slot);

CREATE TABLE event_ends (         -- the readable offsets of a topic
    topic integer PRIMARY KEY,
    start bigint NOT NULL,
    next bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE events_numbered (    -- how far rows have offsets
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    upto bigint NOT NULL,
    sample_drawn bigint,          -- a sample whose transactions were in progress (events.py)
    sample_transaction bigint
) WITH (fillfactor = 10);
INSERT INTO events_numbered (upto) VALUES (0);

DO $$
BEGIN
    FOR n IN 0..7 LOOP
        EXECUTE format('CREATE TABLE events_%s PARTITION OF events (PRIMARY KEY (seq)) FOR VALUES IN (%s)
            WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE TABLE event_offsets_%s PARTITION OF event_offsets (PRIMARY KEY (topic, first))
            FOR VALUES IN (%s) WITH (autovacuum_enabled = false)', n, n);
    END LOOP;
END $$;
