-- Version 16: a slot for leases that outlast the others of their slot. Their tokens still name the slot that they left.

CREATE TABLE lease_8 PARTITION OF lease (PRIMARY KEY (id)) FOR VALUES IN (8);
CREATE INDEX ON lease_8 (until);
CREATE INDEX ON lease_8 (topic, request) WHERE request IS NOT NULL;
CREATE INDEX ON lease_8 (topic, holder) WHERE holder IS NOT NULL;
