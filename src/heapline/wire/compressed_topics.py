"""Topics whose bodies are compressed on the wire: those with the setting compression="zstd".

A side learns the setting when it first has a large body of the topic to send. It asks in the background, so that body
travels as it is. The answer is used for a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from heapline.contract.errors import HeaplineError
from heapline.contract.message import TopicInfo
from heapline.owned_tasks import OwnedTasks

VALID_SECONDS = 60.0
TOPICS_MAX = 10_000  # that are remembered


class CompressedTopics:
    """`get_topic` returns the settings of a topic."""

    def __init__(self, get_topic: Callable[[str], Awaitable[TopicInfo]]) -> None:
        self._get_topic = get_topic
        self._known: dict[str, tuple[bool, float]] = {}  # whether it is compressed, and until when that is valid
        self._asking: set[str] = set()
        self._tasks = OwnedTasks()

    def has(self, topic: str) -> bool:
        """Return whether bodies of the topic are compressed, as far as it is known."""
        if not topic:
            return False
        is_compressed, until = self._known.get(topic, (False, 0.0))
        if asyncio.get_running_loop().time() >= until and topic not in self._asking:
            self._asking.add(topic)
            self._tasks.spawn(self.ask(topic))
        return is_compressed

    async def ask(self, topic: str) -> bool:
        """Return whether bodies of the topic are compressed, as its settings say now."""
        is_compressed = False
        try:
            is_compressed = (await self._get_topic(topic)).config.compression == "zstd"
        except HeaplineError:
            pass  # it does not exist, or cannot be read now: its bodies travel as they are
        finally:
            self._asking.discard(topic)
        if len(self._known) >= TOPICS_MAX:
            self._known.clear()
        self._known[topic] = is_compressed, asyncio.get_running_loop().time() + VALID_SECONDS
        return is_compressed

    async def close(self) -> None:
        await self._tasks.cancel()
