-- Version 5: how many messages each topic has, without counting them.
--
-- Every statement that stores, moves or removes messages adds a row with the differences. A topic's count is the sum of
-- its rows. A full slot is closed, and its sums are moved to the open one. Rows are only inserted, so transactions never
-- wait for each other here.

CREATE TABLE counts (
    slot smallint NOT NULL,
    topic integer NOT NULL,
    ready bigint NOT NULL DEFAULT 0,
    delayed bigint NOT NULL DEFAULT 0,
    leased bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0
) PARTITION BY LIST (slot);

CREATE SEQUENCE counts_turn MINVALUE 0 START 0;

DO $$
BEGIN
    FOR n IN 0..3 LOOP
        EXECUTE format('CREATE TABLE counts_%s PARTITION OF counts FOR VALUES IN (%s)
            WITH (autovacuum_enabled = false)', n, n);
        EXECUTE format('CREATE INDEX ON counts_%s (topic)', n);
    END LOOP;
    FOR n IN 0..7 LOOP
        EXECUTE format('CREATE INDEX ON lease_%s (topic, holder) WHERE holder IS NOT NULL', n);
    END LOOP;
END $$;

-- Topics whose counts are wrong, with the differences. There must be none. To correct them:
-- INSERT INTO counts SELECT 0, * FROM miscounted;
CREATE VIEW miscounted AS
SELECT topic, sum(ready)::bigint AS ready, sum(delayed)::bigint AS delayed, sum(leased)::bigint AS leased,
       sum(dead)::bigint AS dead
FROM (
    SELECT topic, count(*) AS ready, 0 AS delayed, 0 AS leased, 0 AS dead FROM ready GROUP BY topic
    UNION ALL SELECT topic, 0, count(*), 0, 0 FROM delayed GROUP BY topic
    UNION ALL SELECT topic, 0, 0, count(*), 0 FROM lease GROUP BY topic
    UNION ALL SELECT topic, 0, 0, 0, count(*) FROM dead GROUP BY topic
    UNION ALL SELECT topic, -sum(ready), -sum(delayed), -sum(leased), -sum(dead) FROM counts GROUP BY topic
) AS all_counts
WHERE topic IN (SELECT id FROM topics)
GROUP BY topic HAVING (sum(ready), sum(delayed), sum(leased), sum(dead)) IS DISTINCT FROM (0, 0, 0, 0);

INSERT INTO counts SELECT 0, * FROM miscounted;
