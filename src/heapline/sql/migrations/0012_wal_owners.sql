-- Version 12: which process flushes a node's log. A copy of its directory has the same log, with other units.

CREATE TABLE wal_owners (
    wal bigint PRIMARY KEY,       -- the log's id
    owner bigint NOT NULL         -- a random number of the process that opened it last
);
