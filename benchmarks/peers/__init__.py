"""Other queues, each as fast as its own settings allow and as durable as Heapline: what it is compared with.

One file per peer. `PEERS` lists those of `server`, `TASK_PEERS` those of `sdk`; peer.py has what they share,
install.py how they are installed.
"""

from __future__ import annotations

from benchmarks.peers.awa import Awa
from benchmarks.peers.beanstalkd import Beanstalkd
from benchmarks.peers.celery import Celery, CeleryEverysec
from benchmarks.peers.jetstream import JetStream
from benchmarks.peers.peer import Peer
from benchmarks.peers.postgres import Postgres
from benchmarks.peers.procrastinate import Procrastinate
from benchmarks.peers.rabbitmq import RabbitMQ
from benchmarks.peers.redis import Redis

PEERS: dict[str, type[Peer]] = {
    "beanstalkd": Beanstalkd,
    "redis": Redis,
    "postgres": Postgres,
    "awa": Awa,
    "procrastinate": Procrastinate,
    "rabbitmq": RabbitMQ,
    "jetstream": JetStream,
}
#: Peers that call a handler for each message.
TASK_PEERS: dict[str, type[Peer]] = {
    "awa": Awa,
    "procrastinate": Procrastinate,
    "celery": Celery,
    "celery-everysec": CeleryEverysec,
}
