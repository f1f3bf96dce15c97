-- Version 11: the units of the buffer in Redis that are stored here, so that none is stored twice. An id is written in
-- the transaction that stores the unit's messages, and forgotten when Redis cannot have the unit any more.
CREATE TABLE flushed_units (
    id bigint PRIMARY KEY,
    at bigint NOT NULL            -- when it was stored, ms
);
CREATE INDEX ON flushed_units (at);
