-- name: lock_nodes
SELECT pg_advisory_xact_lock(hashtextextended($1, 0));

-- name: free_node
-- The ids of its last owner are up to last_id, even if the clock is set back after this. A crashed one may have minted
-- ids for $2 ms after its lease. A number whose ids are ahead of the clock is not free.
SELECT node, last_id FROM (
    SELECT n.node, o.until, greatest(o.last_id, 0, CASE WHEN o.until > 0 THEN
        ((o.until + $2 - 1704067200000) << 22) | (n.node::bigint << 12) | 4095 END) AS last_id
    FROM generate_series(0, 1023) AS n(node) LEFT JOIN nodes AS o ON o.node = n.node
    WHERE o.node IS NULL OR o.until = 0 OR o.until + $1 < clock_ms()
) AS free WHERE last_id = 0 OR (last_id >> 22) + 1704067200000 <= clock_ms() + $2
ORDER BY until IS DISTINCT FROM 0, node LIMIT 1;

-- name: lease_node
INSERT INTO nodes (node, owner, until, last_id) VALUES ($1, $2, clock_ms() + $3, $4)
ON CONFLICT (node) DO UPDATE SET owner = excluded.owner, until = excluded.until, last_id = excluded.last_id
RETURNING until;

-- name: renew_node
UPDATE nodes SET until = greatest(until, clock_ms() + $3) WHERE node = $1 AND owner = $2 AND until > clock_ms() RETURNING until;

-- name: node_until
SELECT until FROM nodes WHERE node = $1 AND owner = $2;

-- name: has_other_nodes
SELECT EXISTS (SELECT FROM nodes WHERE owner <> $1 AND until > clock_ms());

-- name: release_node
UPDATE nodes SET until = 0, last_id = $3 WHERE node = $1 AND owner = $2 AND until > 0;
