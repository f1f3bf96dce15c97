"""The parts of one attempt of one task: prepared a few at a time, so that server and task work at the same time.

A part has a name that no other attempt has, and a prepare may be repeated, so a call whose answer was lost is just made
again. Nothing is visible until somebody commits; what is never committed is dropped by the server in time.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from heapline.client.log_calls import LogCalls
from heapline.client.target import ClientTls
from heapline.spark.options import Target
from heapline.spark.outgoing import Shares, TopicFacts
from heapline.wire import shapes
from heapline.wire.schema import pb

WINDOW = 3  # prepares under way


def calls_of(target: Target) -> LogCalls:
    """Of a settled target."""
    tls = None if target.ca_file is None else ClientTls(ca=target.ca_file)
    return LogCalls(tuple((target.url or "").split(",")), target.api_key, tls)


class PartSender:
    def __init__(self, calls: LogCalls, batch_id: str, partition: int, attempt: int) -> None:
        self._calls, self._batch_id = calls, batch_id
        self.prefix = f"{partition}.{attempt}.{secrets.token_hex(6)}"
        self._under_way: deque[tuple[Any, Any]] = deque()
        self.parts = 0

    def send(self, shares: Shares) -> None:
        """Returns when it is on its way; raises what an earlier one was answered."""
        request = pb.PrepareBatchRequest(
            batch_id=self._batch_id, part=part_name(self.prefix, self.parts), without_results=True,
            shares=[pb.TopicMessages(topic=topic, columns=columns) for topic, columns in shares],
        )  # fmt: skip
        self.parts += 1
        while len(self._under_way) >= WINDOW:
            self._wait()
        self._under_way.append((request, self._calls.begin("PrepareBatch", request)))

    def _wait(self) -> None:
        request, future = self._under_way.popleft()
        try:
            future.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            self._calls("PrepareBatch", request)  # again, and again; or it says what is wrong with it

    def finish(self) -> None:
        """Returns when all are durable."""
        while self._under_way:
            self._wait()

    def give_up(self) -> None:
        for _, future in self._under_way:
            future.cancel()
        self._under_way.clear()


def part_name(prefix: str, number: int) -> str:
    return f"{prefix}.{number}"


class Topics:
    """What the topics take, asked for when one is first met."""

    def __init__(self, calls: LogCalls) -> None:
        self._calls = calls
        self._known: dict[str, TopicFacts] = {}
        self._asked: set[str] = set()

    def __call__(self, names: Sequence[str]) -> Mapping[str, TopicFacts]:
        if not self._asked.issuperset(names):
            self._asked.update(names)
            infos = map(shapes.unpack_info, self._calls("ListHeaps", pb.Nothing()).heaps)
            self._known |= {info.name: TopicFacts.of(info) for info in infos if info.name in self._asked}
        return self._known
