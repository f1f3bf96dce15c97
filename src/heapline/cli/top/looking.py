"""How one look at a server is taken: all topics, or one, asked side by side.

What can be wrong with a single topic (it reloads, is damaged, or is not ours to see) becomes a few words in its row;
what is wrong with the server as a whole is raised.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from heapline.broker import Broker
from heapline.cli.top.model import Look
from heapline.errors import (
    CorruptionError,
    DeadlineExceeded,
    HeaplineError,
    PermissionDenied,
    TopicNotFound,
    TopicReloading,
)
from heapline.model import TopicStats

AT_ONCE = 16  # calls


async def look(broker: Broker, only: str | None = None) -> Look:
    """Raises TopicNotFound if `only` is not there."""
    if only is not None:
        return Look(monotonic(), {only: await broker.stats(only)})
    names = [info.name for info in await broker.list_topics()]
    turns, unanswered = asyncio.Semaphore(AT_ONCE), list[HeaplineError]()

    async def ask(name: str) -> TopicStats | str | None:
        async with turns:
            if len(unanswered) >= min(AT_ONCE, len(names)):
                raise unanswered[0]  # not a topic is in trouble, the server is
            try:
                return await broker.stats(name)
            except TopicNotFound:
                return None  # deleted just now
            except HeaplineError as error:
                if isinstance(error, DeadlineExceeded):
                    unanswered.append(error)
                return in_few_words(error)

    told = await asyncio.gather(*map(ask, names))
    if names and len(unanswered) == len(names):
        raise unanswered[0]
    return Look(monotonic(), {name: said for name, said in zip(names, told, strict=True) if said is not None})


def in_few_words(error: HeaplineError) -> str:
    """
    >>> in_few_words(DeadlineExceeded("Stats"))
    'no answer'
    """
    for kind, words in (
        (PermissionDenied, "not yours to see"), (CorruptionError, "damaged: see heapline journal verify"),
        (TopicReloading, "reloading"), (DeadlineExceeded, "no answer"),
    ):  # fmt: skip
        if isinstance(error, kind):
            return words
    return type(error).__name__
