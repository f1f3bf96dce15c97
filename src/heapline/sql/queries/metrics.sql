-- name: depths
SELECT t.namespace, t.name, coalesce(sum(c.ready), 0)::bigint AS ready, coalesce(sum(c.delayed), 0)::bigint AS delayed,
       coalesce(sum(c.leased), 0)::bigint AS leased, coalesce(sum(c.dead), 0)::bigint AS dead
FROM topics AS t LEFT JOIN counts AS c ON c.topic = t.id
GROUP BY t.id, t.namespace, t.name ORDER BY t.id;
