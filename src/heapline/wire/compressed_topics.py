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


class CompressionSettings:
    """The known state of the setting. `now` is in seconds of any clock that only increases."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bool, float]] = {}  # whether it is compressed, and until when that is valid
        self._asking: set[str] = set()

    def has(self, topic: str) -> bool:
        """Return whether bodies of the topic are compressed, as far as it is known."""
        return self._known.get(topic, (False, 0.0))[0]

    def is_due(self, topic: str, now: float) -> bool:
        """Return whether to ask for the topic's settings: call `begin`, and `learn` with the answer."""
        known = self._known.get(topic)
        return bool(topic) and topic not in self._asking and (known is None or now >= known[1])

    def begin(self, topic: str) -> None:
        """Take note that the server was asked."""
        self._asking.add(topic)

    def learn(self, topic: str, info: TopicInfo | None, now: float) -> None:
        """Take note of the answer. It is None if the topic does not exist, or cannot be read now."""
        self._asking.discard(topic)
        if len(self._known) >= TOPICS_MAX:
            self._known.clear()
        self._known[topic] = info is not None and info.config.compression == "zstd", now + VALID_SECONDS


class CompressedTopics:
    """`get_topic` returns the settings of a topic."""

    def __init__(self, get_topic: Callable[[str], Awaitable[TopicInfo]]) -> None:
        self._get_topic = get_topic
        self._settings = CompressionSettings()
        self._tasks = OwnedTasks()

    def has(self, topic: str) -> bool:
        """Return whether bodies of the topic are compressed, as far as it is known."""
        if self._settings.is_due(topic, asyncio.get_running_loop().time()):
            self._settings.begin(topic)
            self._tasks.spawn(self.ask(topic))
        return self._settings.has(topic)

    async def ask(self, topic: str) -> bool:
        """Return whether bodies of the topic are compressed, as its settings say now."""
        info: TopicInfo | None = None
        try:
            info = await self._get_topic(topic)
        except HeaplineError:
            pass  # it does not exist, or cannot be read now: its bodies travel as they are
        finally:
            self._settings.learn(topic, info, asyncio.get_running_loop().time())
        return self._settings.has(topic)

    async def close(self) -> None:
        await self._tasks.cancel()
