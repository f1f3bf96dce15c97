"""The generated parts of docs/wire.md: the table of commands, the structures, and the test vectors.

    python -m tests.unit.wire.wire_page

writes them into the page, between comments that name them.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import types
import typing
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

import heapline.contract
from heapline.contract.call import CALLS, Call, Feed, Page
from heapline.contract.columns import Packed, pack
from heapline.contract.errors import TopicNotFound, Unauthenticated
from heapline.contract.leases import Pop
from heapline.contract.log import RawUnit, RawUnits, ReadUnits
from heapline.contract.message import LogEvent
from heapline.contract.messages import EnqueueBatch, EnqueuedBatch, NewMessages
from heapline.contract.topics import GetTopic, PauseTopic
from heapline.wire import codec, error_codes
from heapline.wire.frames import ClientFrames, Headers, ServerFrames, Windows
from heapline.wire.frames.format import Kind
from tests.unit.wire.frames.connection import frame
from tests.unit.wire.wire_decoder import decode_frame

PAGE = Path(__file__).parents[3] / "docs" / "wire.md"
PACKED = {"q": "i64", "d": "f64", "B": "u8", "H": "u16"}
PLAIN = {
    int: "int",
    float: "float",
    str: "text",
    bool: "bool",
    bytes: "bin",
    memoryview: "packed i64",
    datetime: "time",
}


LOG_COLUMN = (
    "one of: `dtype` text and `data` bin (packed numbers; `<i8` is i64, `<f8` f64, `|u1` u8); `columns` map of text to "
    "LogColumn; `value` any"
)


def every_call() -> list[type[Call[Any]]]:
    for module in pkgutil.iter_modules(heapline.contract.__path__):
        importlib.import_module(f"heapline.contract.{module.name}")
    return [CALLS[number] for number in sorted(CALLS)]


# -- types -------------------------------------------------------------------------------------------------------------


def type_name(hint: Any, found: dict[str, Any]) -> str:
    """Return a type as the page writes it, and add the structures that it names to `found`."""
    if hint in PLAIN:
        return PLAIN[hint]
    if hint is Any:
        return "any"
    if isinstance(hint, typing.TypeVar):
        return "X"
    if hint is type(None):
        return "nil"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        packed = next((note for note in hint.__metadata__ if isinstance(note, Packed)), None)
        if packed is None:
            return type_name(arguments[0], found)
        return f"packed {PACKED[packed.form]}" + ("" if packed.none is None else f" ({packed.none:g}: none)")
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(each, found) for each in arguments if each is not msgspec.UnsetType)
    if origin in (list, tuple, Sequence):
        inner = [each for each in arguments if each is not Ellipsis]
        items = ", ".join(type_name(each, found) for each in inner)
        return f"list of ({items})" if " or " in items else f"list of {items}"
    if origin is dict:
        return f"map of {type_name(arguments[0], found)} to {type_name(arguments[1], found)}"
    if origin is typing.Literal:
        return " or ".join(json.dumps(each) for each in arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(json.dumps(member.value) for member in hint)
    if isinstance(hint, type) and issubclass(hint, Exception):
        return "Error"
    struct = origin or hint
    if not issubclass(struct, msgspec.Struct):
        raise TypeError(f"the page has no name for {hint!r}")
    if struct is Page:
        found.setdefault("Page of X", Page)
        return f"Page of {type_name(arguments[0], found)}"
    found.setdefault(struct.__name__, struct)
    return struct.__name__


def fields_of(kind: Any, found: dict[str, Any]) -> list[str]:
    rows = []
    for field in msgspec.structs.fields(kind):
        is_optional = "" if field.required else "?"
        name = type_name(field.type, found)
        if field.name == "duplicates":
            name = name.replace("i64", "u8")
        if kind is LogEvent and field.name == "columns":
            name = "map of text to LogColumn"
        rows.append(f"`{field.encode_name}`{is_optional} {name}{default_of(field)}")
    return rows


def default_of(field: msgspec.structs.FieldInfo) -> str:
    value = field.default.value if isinstance(field.default, Enum) else field.default
    return f" = {json.dumps(value)}" if isinstance(value, bool | int | float | str) else ""


def commands() -> str:
    found: dict[str, Any] = {}
    lines = ["| number | command | fields of the request | result | |", "|---|---|---|---|---|"]
    for kind in every_call():
        fields = "; ".join(fields_of(kind, found)) or "none"
        result = "none" if kind.result is type(None) else type_name(kind.result, found)
        if issubclass(kind, Feed):
            result = f"feed of {result}"
        meaning = (kind.__doc__ or "").strip().partition("\n")[0]
        lines.append(f"| 0x{kind.facts.id:02x} | {kind.__name__} | {fields} | {result} | {meaning} |")
    lines += ["", "| structure | fields |", "|---|---|"]
    done: set[str] = set()
    while names := sorted(set(found) - done):
        for name in names:
            done.add(name)
            found_fields = fields_of(found[name], found)
            lines.append(f"| {name} | {'; '.join(found_fields)} |")
    lines.append(f"| LogColumn | {LOG_COLUMN} |")
    head = lines.index("| structure | fields |") + 2
    return "\n".join(lines[:head] + sorted(lines[head:]))


def errors() -> str:
    lines = ["| error | code | facts |", "|---|---|---|"]
    for kind in sorted(error_codes.tree(), key=lambda kind: kind.__name__):
        facts = ", ".join(f"`{name}`" for name in kind.fields) or "none"
        lines.append(f"| {kind.__name__} | {error_codes.codes_of(kind).grpc} | {facts} |")
    return "\n".join(lines)


# -- vectors -----------------------------------------------------------------------------------------------------------

WINDOWS = Windows()
HEADERS = Headers(
    2.5, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1", "order-7", "c0ffee", "user:ada"
)
UNTIL = datetime(2027, 1, 2, 3, 4, 5, 600_000, UTC)
BATCH = EnqueueBatch("jobs", NewMessages([b"a", b"bc"], pack([5, -1])))
#: A zstd frame of {"topic": "jobs", "payload": 5000 times "a"}: fixed, because libraries compress differently.
COMPRESSED = "28b52ffd609f12fd0000c082a5746f706963a46a6f6273a77061796c6f6164c51388610100104e0fc6"


def vectors() -> Iterator[tuple[str, str, bytes]]:
    """Yield name, sender and bytes of each vector: one conversation, in order."""
    client = ClientFrames("hl_key", client="example/1.0", windows=WINDOWS, compressions=_AnnouncedZstd)
    server = ServerFrames(
        WINDOWS, waiting_commands=frozenset({0x20}), server="heapline/1.0", compressions=_AnnouncedZstd
    )

    def sent(side: ClientFrames | ServerFrames) -> bytes:
        data = b"".join(side.take())
        (server if side is client else client).receive(data)
        return data

    yield "HELLO", "client", sent(client)
    server.send_welcome()
    yield "WELCOME", "server", sent(server)
    number = client.send_request(PauseTopic.facts.id, codec.encode(PauseTopic("jobs", UNTIL)), HEADERS)
    yield "REQUEST with headers: PauseTopic", "client", sent(client)
    server.send_response(number, codec.encode_result(None))
    yield "RESPONSE without a result", "server", sent(server)
    number = client.send_request(EnqueueBatch.facts.id, codec.encode(BATCH))
    yield "REQUEST with columns: EnqueueBatch", "client", sent(client)
    server.send_response(number, codec.encode_result(EnqueuedBatch(pack([1001, 1002]))))
    yield "RESPONSE with a column", "server", sent(server)
    number = client.send_request(GetTopic.facts.id, codec.encode(GetTopic("mail")))
    yield "REQUEST: GetTopic", "client", sent(client)
    server.send_error(number, codec.encode_error(TopicNotFound("mail")))
    yield "ERROR", "server", sent(server)
    number = client.send_request(ReadUnits.facts.id, codec.encode(ReadUnits("jobs", 1, 3)))
    yield "REQUEST of a feed: ReadUnits", "client", sent(client)
    client.send_credit(number, 2)
    yield "CREDIT", "client", sent(client)
    server.send_item(number, codec.encode(RawUnits([RawUnit(1, 0, b"\x00\x01")])))
    yield "ITEM", "server", sent(server)
    server.send_end(number)
    yield "END", "server", sent(server)
    number = client.send_request(Pop.facts.id, codec.encode(Pop("jobs", wait=30.0)))
    yield "REQUEST that waits: Pop", "client", sent(client)
    client.send_cancel(number)
    yield "CANCEL", "client", sent(client)
    server.send_error(number, codec.encode_failure("CANCELLED", "the caller cancelled this request"))
    yield "ERROR of a cancelled request", "server", sent(server)
    number = client.send_auth("hl_newer_key")
    yield "AUTH", "client", sent(client)
    server.send_response(number)
    yield "RESPONSE to AUTH", "server", sent(server)
    body = codec.encode(GetTopic("jobs"))
    yield "REQUEST, first piece", "client", frame(Kind.REQUEST, 7, body[:4], flags=2, command=GetTopic.facts.id)
    yield "REQUEST, last piece", "client", frame(Kind.REQUEST, 7, body[4:], command=GetTopic.facts.id)
    yield (
        "REQUEST, compressed: Enqueue",
        "client",
        frame(Kind.REQUEST, 8, bytes.fromhex(COMPRESSED), flags=4, command=0x10),
    )
    yield "PING", "client", frame(Kind.PING, 9)
    yield "PONG", "server", frame(Kind.PONG, 9)
    server.send_goaway("the server is stopping")
    yield "GOAWAY", "server", sent(server)
    refusing = ServerFrames(WINDOWS, compressions={})
    refusing.receive(b"".join(ClientFrames("hl_wrong", compressions={}).take()))
    refusing.send_error(0, codec.encode_error(Unauthenticated("unknown key")))
    yield "ERROR that refuses HELLO", "server", b"".join(refusing.take())


class _Announced:
    """Lets both sides announce zstd; the vectors that are built here are too small to be compressed."""

    def compress(self, data: Any) -> bytes:
        raise AssertionError("no vector is large enough")

    def unpacked_size(self, data: Any) -> None:
        raise AssertionError("no vector is compressed here")

    def decompress(self, data: Any, size_max: int) -> bytes:
        raise AssertionError("no vector is compressed here")


_AnnouncedZstd = {"zstd": _Announced()}


def vector_block() -> str:
    rows = []
    for name, sender, data in vectors():
        fields = decode_frame(data)
        shown = {key: value for key, value in fields.items() if value is not None}
        rows.append(json.dumps({"name": name, "from": sender, "hex": data.hex(), **shown}, ensure_ascii=False))
    return "```json\n[\n" + ",\n".join(rows) + "\n]\n```"


# -- the page ----------------------------------------------------------------------------------------------------------

PARTS = {"commands": commands, "errors": errors, "vectors": vector_block}


def generated(text: str) -> str:
    """Return the page with its generated parts."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
        assert len(pattern.findall(text)) == 1, name
        text = pattern.sub(lambda match, make=make: match[1] + make() + match[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
