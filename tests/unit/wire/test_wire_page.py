"""docs/wire.md is true: its tables and vectors are Heapline's, and a second decoder reads them."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import pyarrow as pa
import pytest

from heapline.contract.errors import TopicNotFound, Unauthenticated
from heapline.contract.leases import Pop
from heapline.contract.log import ReadUnits
from heapline.contract.messages import Enqueue, EnqueueBatch, EnqueuedBatch
from heapline.contract.topics import GetTopic, PauseTopic
from heapline.wire import codec
from heapline.wire.frames import (
    Auth,
    Cancel,
    ClientFrames,
    Credit,
    End,
    Error,
    GoAway,
    Headers,
    Hello,
    Item,
    Request,
    Response,
    ServerFrames,
    Welcome,
    Windows,
    format,
)
from heapline.wire.frames.format import Kind
from tests.unit.wire.frames.connection import connected, drain
from tests.unit.wire.wire_decoder import COMPRESSED, HEADERS, KINDS, MORE, decode_frame, decode_map, split
from tests.unit.wire.wire_page import BATCH, PAGE, UNTIL, generated
from tests.unit.wire.wire_page import HEADERS as VECTOR_HEADERS

TEXT = PAGE.read_text(encoding="utf-8")
VECTORS: list[dict[str, Any]] = json.loads(TEXT.partition("```json")[2].partition("```")[0])


class ArrowZstd:
    """zstd of pyarrow, which the tests have installed anyway."""

    def compress(self, data: Any) -> bytes:
        compressed: bytes = pa.Codec("zstd").compress(bytes(data), asbytes=True)
        return compressed

    def unpacked_size(self, data: Any) -> None:
        return None

    def decompress(self, data: Any, size_max: int) -> bytes:
        try:
            with pa.input_stream(pa.py_buffer(data), compression="zstd") as stream:
                plain: bytes = stream.read(size_max + 1)
        except OSError as error:
            raise ValueError(str(error)) from None
        if len(plain) > size_max:
            raise ValueError("too large")
        return plain


ZSTD = {"zstd": ArrowZstd()}


def sent_by(side: str) -> list[dict[str, Any]]:
    return [vector for vector in VECTORS if vector["from"] == side]


def test_page_is_generated_from_the_contract_and_the_protocol() -> None:
    assert generated(TEXT) == TEXT, "run: python -m tests.unit.wire.wire_page"


def test_tables_of_the_page_name_the_kinds_windows_and_limits() -> None:
    kinds = re.findall(r"^\| (\d+) \| ([A-Z]+) \| (?:client|server|both) \|", TEXT, re.MULTILINE)
    assert [(int(number), name) for number, name in kinds] == [(kind.value, kind.name) for kind in Kind]
    assert [kind.name for kind in Kind] == KINDS
    windows = re.findall(r"^\| `(\w+)` \| (\d+)( MiB)? \|", TEXT, re.MULTILINE)
    assert {name: int(size) << (20 if unit else 0) for name, size, unit in windows} == {
        name: getattr(Windows(), name) for name in Windows.__struct_fields__
    }
    assert f"{format.LENGTH_MAX:,}".replace(",", " ") in TEXT
    assert f"at most {format.LENGTH_MAX_BEFORE_WELCOME} until" in TEXT
    assert f"at most {format.HEADERS_MAX}." in TEXT
    assert format.CREDITS_MAX == 2**31
    fields = set(re.findall(r"`(\w+)`", TEXT))
    for struct_ in (Hello, Welcome, Headers):
        assert fields >= set(struct_.__struct_fields__)


def test_vectors_have_every_kind_and_flag() -> None:
    assert {vector["kind"] for vector in VECTORS} == set(KINDS)
    assert {vector["flags"] for vector in VECTORS} == {0, HEADERS, MORE, COMPRESSED}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_second_decoder_reads_each_vector(vector: dict[str, Any]) -> None:
    decoded = decode_frame(bytes.fromhex(vector["hex"]))
    assert decoded == {"headers": None, "body": None, **{k: v for k, v in vector.items() if k in decoded}}


def test_pieces_and_compressed_vector_match_the_page() -> None:
    bodies = {vector["name"]: bytes.fromhex(vector["hex"])[12:] for vector in VECTORS}
    whole = bodies["REQUEST, first piece"] + bodies["REQUEST, last piece"]
    assert decode_map(whole) == {"topic": "jobs"}
    with pa.input_stream(pa.py_buffer(bodies["REQUEST, compressed: Enqueue"]), compression="zstd") as stream:
        assert decode_map(stream.read()) == {"topic": "jobs", "payload": "bin:" + "61" * 5000}


def test_server_reads_the_clients_vectors() -> None:
    server = ServerFrames(compressions=ZSTD)
    events = []
    for vector in sent_by("client"):
        events += server.receive(bytes.fromhex(vector["hex"]))
        if vector["kind"] == "HELLO":
            server.send_welcome()
    hello, *rest = events
    assert isinstance(hello, Hello)
    assert (hello.credential, hello.client, hello.features) == ("hl_key", "example/1.0", ["zstd"])
    decoded = [codec.decode_call(bytes(e.body), KIND_OF[e.command]) for e in rest if isinstance(e, Request)]
    assert decoded == [
        PauseTopic("jobs", UNTIL),
        BATCH,
        GetTopic("mail"),
        ReadUnits("jobs", 1, 3),
        Pop("jobs", wait=30.0),
        GetTopic("jobs"),
        Enqueue("jobs", b"a" * 5000),
    ]
    assert rest[0].headers == VECTOR_HEADERS
    others = [event for event in rest if not isinstance(event, Request)]
    assert others == [Credit(4, 2), Cancel(5), Auth(6, "hl_newer_key")]
    assert decode_frame(drain(server)[-12:])["kind"] == "PONG"


KIND_OF = {kind.facts.id: kind for kind in (PauseTopic, EnqueueBatch, GetTopic, ReadUnits, Pop, Enqueue)}


def test_client_reads_the_servers_vectors() -> None:
    client = ClientFrames(compressions=ZSTD)
    welcome, *answers, refusal = sent_by("server")
    assert isinstance(client.receive(bytes.fromhex(welcome["hex"]))[0], Welcome)
    for _ in range(5):
        client.send_request(1, b"")
    client.send_credit(4, 2)
    client.send_auth("hl_newer_key")
    events = [event for vector in answers for event in client.receive(bytes.fromhex(vector["hex"]))]
    assert [(type(event), getattr(event, "request", 0)) for event in events] == [
        (Response, 1),
        (Response, 2),
        (Error, 3),
        (Item, 4),
        (End, 4),
        (Error, 5),
        (Response, 6),
        (GoAway, 0),
    ]
    assert codec.decode_result(events[1].body, EnqueueBatch) == EnqueuedBatch(
        memoryview(struct.pack("<2q", 1001, 1002))
    )
    assert type(events[2].error) is TopicNotFound
    assert events[5].error.args == ("the caller cancelled this request",)
    assert events[7].text == "the server is stopping"
    refused = ClientFrames(compressions={}).receive(bytes.fromhex(refusal["hex"]))[0]
    assert type(refused.error) is Unauthenticated


@pytest.mark.parametrize("compress", [False, True])
def test_second_decoder_joins_a_large_body_with_headers(compress: bool) -> None:
    client, _ = connected(compressions=ZSTD)
    numbers = struct.pack("<200000q", *range(200_000))
    command = EnqueueBatch("jobs", BATCH.messages.__class__([numbers, numbers[::-1]]))
    client.send_request(0x11, codec.encode(command), Headers(1.5), compress=compress)
    client.send_request(0x09, codec.encode(GetTopic("jobs")))
    frames = [frame for frame in split(drain(client, 1)) if frame[3] == 1]
    assert all(frame[1] & MORE for frame in frames[:-1])
    assert frames[0][1] == HEADERS | MORE | (COMPRESSED if compress else 0)
    (length,) = struct.unpack_from("<H", frames[0][4])
    assert decode_map(frames[0][4][2 : 2 + length]) == {"timeout": 1.5}
    body = frames[0][4][2 + length :] + b"".join(frame[4] for frame in frames[1:])
    if compress:
        with pa.input_stream(pa.py_buffer(body), compression="zstd") as stream:
            body = stream.read()
    payloads = ["bin:" + numbers.hex(), "bin:" + numbers[::-1].hex()]
    assert decode_map(body) == {"topic": "jobs", "messages": {"payloads": payloads}}


def test_real_zstd_crosses_the_object_both_ways() -> None:
    client, server = connected(compressions=ZSTD)
    number = client.send_request(1, bytes(100_000), compress=True)
    data = drain(client)
    assert len(data) < 1000
    assert server.receive(data)[0].body == bytes(100_000)
    server.send_response(number, bytes(50_000), compress=True)
    assert client.receive(drain(server))[0].body == bytes(50_000)
