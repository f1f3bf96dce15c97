-- name: lock_nodes
SELECT pg_advisory_xact_lock(hashtextextended($1, 0));

-- name: free_node
SELECT n.node, coalesce(o.last_id, 0) AS last_id FROM generate_series(0, 1023) AS n(node)
LEFT JOIN nodes o ON o.node = n.node
WHERE o.node IS NULL OR o.until = 0 OR o.until + $1 < clock_ms()
ORDER BY o.until IS DISTINCT FROM 0, n.node LIMIT 1;

-- name: lease_node
INSERT INTO nodes (node, owner, until, last_id) VALUES ($1, $2, clock_ms() + $3, $4)
ON CONFLICT (node) DO UPDATE SET owner = excluded.owner, until = excluded.until, last_id = excluded.last_id
RETURNING until;

-- name: renew_node
UPDATE nodes SET until = clock_ms() + $3 WHERE node = $1 AND owner = $2 AND until > clock_ms() RETURNING until;

-- name: node_until
SELECT until FROM nodes WHERE node = $1 AND owner = $2;

-- name: has_other_nodes
SELECT EXISTS (SELECT FROM nodes WHERE owner <> $1 AND until > clock_ms());

-- name: release_node
UPDATE nodes SET until = 0, last_id = $3 WHERE node = $1 AND owner = $2 AND until > 0;
