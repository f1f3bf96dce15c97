"""The classes of proto/heapline/v1, made from the descriptors that the build leaves beside this file.

`pb.Outgoing`, `pb.PopRequest`, … are protobuf's own classes; `METHODS` tells what each method of the service takes,
gives and streams, so that server and client need no code generated for either.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "heapline.v1.Heapline"
_FILE = "heapline/v1/heapline.proto"


class Method(NamedTuple):
    name: str
    request: Any
    response: Any
    streams_in: bool
    streams_out: bool

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


class _Messages:
    """Message classes by name."""

    def __init__(self, descriptor: Any) -> None:
        for name, message in descriptor.message_types_by_name.items():
            setattr(self, name, message_factory.GetMessageClass(message))

    def __getattr__(self, name: str) -> Any:  # for type checkers: what is there never comes here
        raise AttributeError(f"proto has no message {name!r}")


def _load() -> Any:
    made = files("heapline.wire").joinpath("heapline.binpb")
    if not made.is_file():
        raise ImportError("heapline.binpb was not built: install the package (`make setup`, or pip install -e .)")
    pool = descriptor_pool.Default()
    for file in descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file:
        pool.Add(file)
    return pool.FindFileByName(_FILE)


_descriptor = _load()
pb = _Messages(_descriptor)
METHODS: dict[str, Method] = {
    m.name: Method(
        m.name, message_factory.GetMessageClass(m.input_type), message_factory.GetMessageClass(m.output_type),
        m.client_streaming, m.server_streaming,
    )
    for m in _descriptor.services_by_name["Heapline"].methods
}  # fmt: skip
