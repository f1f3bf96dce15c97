"""Other people's queues, each as fast as its own means allow and as durable as ours: what ours is measured next to.

One file a peer. `PEERS` names them all; what they have in common is peer.py, how they come here install.py.
"""

from __future__ import annotations

from benchmarks.peers.awa import Awa
from benchmarks.peers.beanstalkd import Beanstalkd
from benchmarks.peers.peer import Peer
from benchmarks.peers.postgres import Postgres
from benchmarks.peers.procrastinate import Procrastinate
from benchmarks.peers.redis import Redis

PEERS: dict[str, type[Peer]] = {
    "beanstalkd": Beanstalkd,
    "redis": Redis,
    "postgres": Postgres,
    "awa": Awa,
    "procrastinate": Procrastinate,
}
