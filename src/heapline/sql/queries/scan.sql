-- name: scan_in_order
-- The statements below merge indexes on the id. Without statistics of new slots, the planner would sort all rows of a range
-- for each page. `topic + 0` leaves it no other index where the one on the id does not begin with the topic.
SET LOCAL enable_sort = off;

-- name: scan_waiting
SELECT * FROM (
    SELECT *, row_number() OVER ranked AS n, sum(size) OVER ranked AS bytes FROM (
        SELECT *, coalesce(octet_length(payload), 0) + coalesce(octet_length(headers), 0) + coalesce(octet_length(name), 0) AS size FROM (
            (SELECT 'ready' AS place, {columns}, NULL::bigint AS wake, NULL::bytea AS holder, NULL::bigint AS until,
                    NULL::bigint AS at
             FROM ready WHERE topic + 0 = $1 AND id >= $2 AND id < $3 ORDER BY id LIMIT $4)
            UNION ALL (SELECT 'delayed', {columns}, wake, NULL, NULL, NULL
             FROM delayed WHERE topic = $1 AND id >= $2 AND id < $3 ORDER BY topic, id LIMIT $4)
            UNION ALL (SELECT 'leased', {columns}, NULL, holder, until, NULL
             FROM lease WHERE topic + 0 = $1 AND id >= $2 AND id < $3 ORDER BY id LIMIT $4)
        ) AS stored ORDER BY id LIMIT $4
    ) AS page WINDOW ranked AS (ORDER BY id ROWS UNBOUNDED PRECEDING)
) AS ranks WHERE n = 1 OR bytes <= $5 ORDER BY n;

-- name: scan_dead
SELECT * FROM (
    SELECT *, row_number() OVER ranked AS n, sum(size) OVER ranked AS bytes FROM (
        SELECT *, coalesce(octet_length(payload), 0) + coalesce(octet_length(headers), 0) + coalesce(octet_length(name), 0) AS size FROM (
            SELECT 'dead' AS place, {columns}, NULL::bigint AS wake, NULL::bytea AS holder, NULL::bigint AS until, at
            FROM dead WHERE topic + 0 = $1 AND id >= $2 AND id < $3
        ) AS stored ORDER BY id LIMIT $4
    ) AS page WINDOW ranked AS (ORDER BY id ROWS UNBOUNDED PRECEDING)
) AS ranks WHERE n = 1 OR bytes <= $5 ORDER BY n;

-- name: first_waiting
SELECT least((SELECT id FROM ready WHERE topic + 0 = $1 ORDER BY id LIMIT 1),
             (SELECT id FROM delayed WHERE topic = $1 ORDER BY topic, id LIMIT 1),
             (SELECT id FROM lease WHERE topic + 0 = $1 ORDER BY id LIMIT 1));

-- name: last_waiting
SELECT greatest((SELECT id FROM ready WHERE topic + 0 = $1 ORDER BY id DESC LIMIT 1),
             (SELECT id FROM delayed WHERE topic = $1 ORDER BY topic DESC, id DESC LIMIT 1),
             (SELECT id FROM lease WHERE topic + 0 = $1 ORDER BY id DESC LIMIT 1));

-- name: first_dead
SELECT id FROM dead WHERE topic + 0 = $1 ORDER BY id LIMIT 1;

-- name: last_dead
SELECT id FROM dead WHERE topic + 0 = $1 ORDER BY id DESC LIMIT 1;

-- name: sample_waiting
SELECT id FROM ready TABLESAMPLE SYSTEM ($2) WHERE topic = $1
UNION ALL SELECT id FROM delayed TABLESAMPLE SYSTEM ($2) WHERE topic = $1
UNION ALL SELECT id FROM lease TABLESAMPLE SYSTEM ($2) WHERE topic = $1;

-- name: sample_dead
SELECT id FROM dead TABLESAMPLE SYSTEM ($2) WHERE topic = $1;
