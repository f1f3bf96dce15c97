"""Work shared over a changing crowd of workers: stable ids, one leader, partitions that stay where they are.

It knows nothing of queues: the engine may use it, it uses nothing of the engine.

>>> from heapline import assign
>>> source = assign.StaticSource([assign.Partition(("tool001", "chamber1"), weight=100)])
>>> config = assign.Config.example("production")
"""

from heapline.assign.config import AssignmentConfig, Config, RetryConfig
from heapline.assign.document import Document
from heapline.assign.election import ElectionAgent, KVElection
from heapline.assign.errors import (
    AssignError,
    AssignmentVersionMismatch,
    BadConfig,
    BadPartition,
    BadStrategy,
    ConnectionLost,
    ElectionFailed,
    ShutdownTimeout,
    StableIDExhausted,
    StartupTimeout,
)
from heapline.assign.hooks import Hooks
from heapline.assign.kv import KV, Conflict, Entry
from heapline.assign.manager import Manager
from heapline.assign.memory_kv import MemoryKV
from heapline.assign.metrics import MetricsCollector, NoMetrics, PrometheusMetrics
from heapline.assign.model import Assignment, Lifecycle, Partition, State
from heapline.assign.nats_kv import NatsKV
from heapline.assign.sources import CallableSource, PartitionSource, StaticSource
from heapline.assign.strategies import AssignmentStrategy, RoundRobinStrategy, WeightedConsistentHashStrategy
from heapline.assign.subscribing import SubscriptionConfig, SubscriptionHelper

__all__ = [
    "AssignError",
    "Assignment",
    "AssignmentConfig",
    "AssignmentStrategy",
    "AssignmentVersionMismatch",
    "BadConfig",
    "BadPartition",
    "BadStrategy",
    "CallableSource",
    "Config",
    "Conflict",
    "ConnectionLost",
    "Document",
    "ElectionAgent",
    "ElectionFailed",
    "Entry",
    "Hooks",
    "KV",
    "KVElection",
    "Lifecycle",
    "Manager",
    "MemoryKV",
    "MetricsCollector",
    "NatsKV",
    "NoMetrics",
    "Partition",
    "PartitionSource",
    "PrometheusMetrics",
    "RetryConfig",
    "RoundRobinStrategy",
    "ShutdownTimeout",
    "StableIDExhausted",
    "StartupTimeout",
    "State",
    "StaticSource",
    "SubscriptionConfig",
    "SubscriptionHelper",
    "WeightedConsistentHashStrategy",
]
