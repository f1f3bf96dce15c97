"""Divide partitions among a changing pool of workers: stable worker ids, one leader, and few moves.

The package knows nothing about queues. The engine may use it; it uses nothing of the engine.

>>> from heapline import assign
>>> source = assign.StaticSource([assign.Partition(("tool001", "chamber1"), weight=100)])
>>> config = assign.Config.example("production")
"""

from heapline.assign.assignment import Assignment, Document, Lifecycle
from heapline.assign.config import AssignmentConfig, Config, RetryConfig
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
from heapline.assign.kv import KV, Conflict, Entry, MemoryKV
from heapline.assign.logger import Logger
from heapline.assign.manager import Manager
from heapline.assign.metrics import MetricsCollector, NoMetrics, PrometheusMetrics
from heapline.assign.nats_kv import NatsKV
from heapline.assign.partitions import CallableSource, Partition, PartitionSource, StaticSource
from heapline.assign.states import State
from heapline.assign.strategies import (
    AssignmentStrategy,
    RoundRobinStrategy,
    StatelessStrategy,
    WeightedConsistentHashStrategy,
)
from heapline.assign.subscriptions import SubscriptionConfig, SubscriptionHelper

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
    "Logger",
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
    "StatelessStrategy",
    "StaticSource",
    "SubscriptionConfig",
    "SubscriptionHelper",
    "WeightedConsistentHashStrategy",
]
