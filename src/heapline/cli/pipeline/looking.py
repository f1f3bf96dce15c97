"""Whether a job can work at all, found out before Spark is started, which takes seconds: is the server there, does it
take the key, is the directory a queue's, is the topic there?

An answer is not kept: what changes afterwards is the job's to find out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heapline.broker import Broker
from heapline.cli import connection
from heapline.cli.present import some
from heapline.errors import BadRequest, TopicNotFound

TIMEOUT = 10.0  # seconds in which a server must have answered


def look(path: Path | None, to: str, key_file: Path | None, ca: Path | None, topics: Sequence[str]) -> None:
    if path is not None:
        _in_directory(path, topics)
    else:
        connection.run_on(functools.partial(_on_server, topics), connection.settle(to, key_file, ca, TIMEOUT))


def needed_topics(given: dict[str, Any]) -> list[str]:
    """Of a job's options: which topics must be there, where the queue is. What is read from a lake, or from another
    directory, need not be."""
    from_elsewhere = given.get("from_path") is not None or (given.get("lake") is not None and "follow" not in given)
    named = given.get("topic") or []
    topics = [named] if isinstance(named, str) else list(named)
    into = [given["into"]] if given.get("into") else topics if "into" in given else []
    return ([] if from_elsewhere else topics) + into


def _plain(topic: str) -> str:
    return topic.removeprefix("default/")


async def _on_server(topics: Sequence[str], hl: Broker) -> None:
    there = {_plain(info.name) for info in await hl.list_topics()}
    for topic in topics:
        if _plain(topic) not in there:
            raise TopicNotFound(topic)


def _in_directory(path: Path, topics: Sequence[str]) -> None:
    from heapline.spark.directory import DirectorySource

    there = {_plain(ref.topic) for ref in DirectorySource(str(path)).topics()}
    for topic in topics:
        if _plain(topic) not in there:
            others = f"there are {some(sorted(there), 10)}" if there else "and no other"
            raise BadRequest(f"there is no topic {topic!r} in --path {str(path)!r}; {others}")
