-- Version 2: what Redis and the nodes' write-ahead logs need.

ALTER TABLE meta ADD COLUMN deployment uuid NOT NULL DEFAULT gen_random_uuid();  -- that of shard 0 counts

-- How far each node's log was flushed: written in the transaction that stores the messages. Rows are added, never
-- updated; the highest counts, lower ones are deleted from time to time.
CREATE TABLE flushed (
    wal bigint NOT NULL,          -- the log's id
    upto bigint NOT NULL,         -- its last unit that is stored here
    at bigint NOT NULL,
    PRIMARY KEY (wal, upto)
);
