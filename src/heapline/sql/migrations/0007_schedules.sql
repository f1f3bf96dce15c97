-- Version 7: schedules. Each is in the shard of its own name, whatever its topic's is.

CREATE TABLE schedules (
    name text COLLATE "C" PRIMARY KEY,  -- namespace/name
    state bytea NOT NULL,         -- as core/schedules/records.py encodes it
    wake bigint,                  -- when it is due, or tried again; NULL: never
    problem text                  -- why its last firing could not be enqueued
);
CREATE INDEX ON schedules (wake) WHERE wake IS NOT NULL;
CREATE SEQUENCE schedule_incarnations;
