-- Version 11: which batches were attached. A part that arrives afterwards is refused.

CREATE TABLE attached (
    batch text PRIMARY KEY,
    at bigint NOT NULL
);
