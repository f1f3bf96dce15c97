"""Rates of namespaces that all nodes share, in Redis: `mqueue:rate:{namespace}`.

Each key holds one number: the time up to which the requests so far use up the rate, in microseconds by the clock of
Redis, so clocks of nodes do not matter. A request moves it by 1/rate, and is refused if it is further ahead than the
burst allows (the generic cell rate algorithm, the same as a token bucket). A key expires when its bucket is full. One
script checks and counts all namespaces of a request, so that a refused request counts in none.
"""

from __future__ import annotations

from collections.abc import Mapping

from heapline.contract.errors import UnavailableError
from heapline.sql.node import Node
from heapline.sql.redis import RedisDown, rate_key

#: Arguments: for each key, the microseconds of one request and of the burst. Returns the number of the key that has to
#: wait longest and its microseconds, or {0, 0} after counting.
TAKE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local used, worst, wait = {}, 0, 0
for i, key in ipairs(KEYS) do
  local cost, burst = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  used[i] = math.max(tonumber(redis.call('GET', key) or 0), now) + cost
  local over = used[i] - now - burst
  if over > wait then worst, wait = i, over end
end
if worst > 0 then return {worst, math.ceil(wait)} end
for i, key in ipairs(KEYS) do
  redis.call('SET', key, string.format('%.2f', used[i]), 'PX', math.ceil((used[i] - now) / 1000) + 1)
end
return {0, 0}
"""


async def take(node: Node, limits: Mapping[str, tuple[float, float]]) -> tuple[str, float] | None:
    """Count a request in each namespace, given its rate per second and burst in requests.

    Return the namespace that is over its rate and the seconds to wait, or None if the request was counted. Raise
    UnavailableError if Redis cannot say.
    """
    if node.redis is None:
        raise UnavailableError("this node has no Redis; its limits are its own")
    names = sorted(limits)
    keys = [rate_key(name) for name in names]
    costs = [1e6 / limits[name][0] for name in names]
    pairs = zip(costs, (limits[name][1] for name in names), strict=True)
    arguments = [f"{number:.2f}" for cost, burst in pairs for number in (cost, cost * burst)]
    try:
        worst, wait = await node.redis.run(lambda client: client.eval(TAKE, len(keys), *keys, *arguments))
    except RedisDown as error:
        raise UnavailableError(f"redis is down ({error}); each node limits rates by itself") from None
    return None if worst == 0 else (names[worst - 1], wait / 1e6)
