"""Protobuf classes of proto/heapline/v1, created at import from the descriptors that the build puts beside this file.

`pb.PopRequest` and the like are protobuf's own classes. `METHODS` has the request and response class of each method of
the service and says which of them are streams, so that server and client need no generated code.

Nothing enters protobuf's default pool, so code that a program has generated from the same proto can be imported too.

A packed `repeated sfixed64`, `double` or `bool` is encoded exactly as a bytes field that holds the array. This module
declares such fields as bytes, so that a column of numbers is never read into one Python object per number. Clients in
other languages see the typed field.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "heapline.v1.Heapline"
FILE = "heapline/v1/heapline.proto"
_Field = descriptor_pb2.FieldDescriptorProto
#: Types whose packed form is an array, with the letter that the `array` module has for it.
ARRAYS = {_Field.TYPE_SFIXED64: "q", _Field.TYPE_DOUBLE: "d", _Field.TYPE_BOOL: "B"}


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

    def __getattr__(self, name: str) -> Any:  # for type checkers; existing names never get here
        raise AttributeError(f"proto has no message {name!r}")


def read_descriptors() -> Any:
    """Return the descriptors as the proto declares them."""
    built = files("heapline.wire").joinpath("heapline.binpb")
    if not built.is_file():
        raise ImportError("heapline.binpb is missing; install the package (`make setup`, or pip install -e .)")
    return descriptor_pb2.FileDescriptorSet.FromString(built.read_bytes())


def declared_pool(*others: Any) -> Any:
    """Return a pool with the proto as it is declared, and other generated modules, as reflection shows them."""
    pool = descriptor_pool.DescriptorPool()
    for file in read_descriptors().file:
        pool.Add(file)
    for module in others:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return pool


def _load() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in read_descriptors().file:
        for message in file.message_type:
            for field in message.field:
                if field.label == _Field.LABEL_REPEATED and field.type in ARRAYS:
                    field.label, field.type = _Field.LABEL_OPTIONAL, _Field.TYPE_BYTES
        pool.Add(file)
    return pool.FindFileByName(FILE)


_descriptor = _load()
pb = _Messages(_descriptor)
METHODS: dict[str, Method] = {
    method.name: Method(
        method.name,
        message_factory.GetMessageClass(method.input_type),
        message_factory.GetMessageClass(method.output_type),
        method.client_streaming,
        method.server_streaming,
    )
    for method in _descriptor.services_by_name["Heapline"].methods
}
