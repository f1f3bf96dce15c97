"""The server that jobs write to, asked by the driver: which sinks it remembers, and what a topic is like.

Where it is stands in the same options as for a read or a write, or in the environment. Every call may be repeated, and
is, while the server cannot be reached: one that restarts does not end a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heapline.errors import BadRequest, TopicNotFound
from heapline.model import SinkInfo, TopicInfo
from heapline.spark.options import Target, plain_topic
from heapline.spark.sources import settled_target

_NAMES = ("heapline.url", "heapline.api_key", "heapline.token", "heapline.api_key_file")


def server_options(where: Mapping[str, str]) -> dict[str, str]:
    """Those of `where` that name a server: what a write takes."""
    if "path" in where:
        raise BadRequest("a directory has one writer, its server: say where that is (--to, heapline.url), not its path")
    return {name: value for name, value in where.items() if name.lower() in _NAMES}


class Server:
    def __init__(self, where: Mapping[str, str]) -> None:
        from heapline.spark.sending import calls_of

        given = {name.lower(): value for name, value in server_options(where).items()}
        key = given.get("heapline.api_key", given.get("heapline.token"))
        self.calls = calls_of(
            settled_target(Target(None, given.get("heapline.url"), key, given.get("heapline.api_key_file")))
        )

    def sinks(self) -> dict[str, SinkInfo]:
        from heapline.wire import shapes
        from heapline.wire.schema import pb

        return {sink.name: sink for sink in shapes.unpack_sinks(self.calls("ListSinks", pb.Nothing()))}

    def topic(self, topic: str) -> TopicInfo:
        from heapline.wire import shapes
        from heapline.wire.schema import pb

        for info in map(shapes.unpack_info, self.calls("ListHeaps", pb.Nothing()).heaps):
            if plain_topic(info.name) == plain_topic(topic):
                return info
        raise TopicNotFound(topic)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.calls.close()


def make_active(spark: Any) -> None:
    """Spark looks for Python's formats in the session that is the thread's active one, and finds none when a write is
    called from a thread that has not used one yet. Making a DataFrame is the public call that sets it."""
    spark.createDataFrame([(0,)], "n int")
