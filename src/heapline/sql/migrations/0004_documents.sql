-- Version 4: small documents that all nodes share, such as keys and users.

CREATE TABLE documents (
    name text PRIMARY KEY,
    version bigint NOT NULL,      -- raised by every change
    content bytea NOT NULL
);
