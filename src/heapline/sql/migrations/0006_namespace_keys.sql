-- Version 6: idempotency keys that are unique in a namespace, as over MQueue's API.

CREATE TABLE namespace_keys (     -- in the shard of the namespace, whatever the topic's is
    namespace text NOT NULL,
    hash bytea NOT NULL,
    topic text NOT NULL,          -- the topic that may store the message with this key
    at bigint NOT NULL,           -- when that topic last claimed it
    expires bigint NOT NULL,
    PRIMARY KEY (namespace, hash)
);
CREATE INDEX ON namespace_keys (expires);
