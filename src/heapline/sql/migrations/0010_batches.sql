-- Version 10: prepared batches. Their messages are stored beside the topics, invisible, until a decision names them.

CREATE TABLE prepared (           -- the messages of one topic in one part
    batch text NOT NULL,
    part text NOT NULL,
    topic integer NOT NULL,
    name text NOT NULL,           -- of the topic
    topics text[] NOT NULL,       -- of all topics of the part: it is complete if each has a row
    digest bytea NOT NULL,        -- of the request, to recognize a repeat
    at bigint NOT NULL,
    messages integer NOT NULL,    -- new ones
    producer text,
    epoch bigint,
    answered bigint,              -- the producer's answered_below
    results bytea NOT NULL,       -- the answer, msgpack
    content bytea NOT NULL,       -- columns of the new messages, msgpack
    PRIMARY KEY (batch, part, topic)
);
CREATE INDEX ON prepared (topic);

CREATE TABLE prepared_keys (      -- idempotency keys that are in doubt
    topic integer NOT NULL,
    hash bytea NOT NULL,
    batch text NOT NULL,
    part text NOT NULL,
    id bigint NOT NULL,
    print bigint NOT NULL,
    scope smallint NOT NULL,
    expires bigint NOT NULL,
    PRIMARY KEY (topic, hash, batch, part)
);
CREATE INDEX ON prepared_keys (batch);

CREATE TABLE prepared_sequences ( -- the same for producers' sequences
    topic integer NOT NULL,
    producer text NOT NULL,
    epoch bigint NOT NULL,
    seq bigint NOT NULL,
    batch text NOT NULL,
    part text NOT NULL,
    id bigint NOT NULL,
    print bigint NOT NULL,
    PRIMARY KEY (topic, producer, epoch, seq, batch, part)
);
CREATE INDEX ON prepared_sequences (batch);

-- These two are used in the first shard only. A row here is the commit of a batch, in whichever shards its messages are.
CREATE TABLE decisions (
    batch text PRIMARY KEY,
    parts text[] NOT NULL,
    messages integer NOT NULL,
    topics text[] NOT NULL,
    sink text,
    version bigint,
    at bigint NOT NULL
);
CREATE TABLE sinks (
    name text PRIMARY KEY,
    version bigint NOT NULL,
    batch text NOT NULL,
    messages integer NOT NULL,
    topics text[] NOT NULL,
    at bigint NOT NULL
);
