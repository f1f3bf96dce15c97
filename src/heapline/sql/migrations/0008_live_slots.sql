-- Version 8: which slots of `ready` may have rows, as a set of bits. Pops look into no others. It is set when a slot is
-- opened, under the rings' lock.

CREATE SEQUENCE ready_live MINVALUE 0 START 65535;
SELECT setval('ready_live', 1 << (last_value % 16)::integer) FROM ready_turn WHERE NOT EXISTS (SELECT FROM ready);
