"""Clients and servers of other minor releases over the native wire: common features work; others are named or ignored.

The other release adds fields wherever a map is sent: in the handshake, in headers, in calls, results and errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heapline.client.transports.native import NativeBroker
from heapline.contract.errors import BadRequest, TopicNotFound, UnavailableError
from heapline.contract.topics import GetTopic
from heapline.wire import codec
from heapline.wire.frames import Error, Response, server
from tests.integration.raw_native import RawNative
from tests.integration.server_rig import Rig
from tests.unit.wire.frames.connection import frame

REQUEST, HEADERS = 3, 1
LATER = {"later": {"since": "1.9"}}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(tmp_path) as rig:
        await rig.behind.create_topic("jobs", **rig.small)
        yield rig


def with_more(body: bytes) -> bytes:
    """Return a body with a field that this release does not have."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(body) | LATER)


class NewerClient(RawNative):
    """Its HELLO offers a later version too, a feature that servers do not have, and more fields."""

    def flush(self) -> None:
        if self.frames.welcome is None:
            (hello,) = self.frames.take()
            fields = msgspec.msgpack.decode(bytes(hello)[12:])
            fields |= {
                "versions": [1, 2],
                "features": ["zstd-3", *fields.get("features", [])],
                "client": "heapline 1.9",
            }
            fields["windows"] = fields.get("windows", {}) | {"later": 7}
            self.writer.write(frame(1, 0, msgspec.msgpack.encode(fields | LATER)))
        super().flush()

    async def answer(self, command: int, body: bytes, headers: bytes = b"") -> Any:
        """Send a request that the frames here do not have, and return its answer."""
        number = self.frames.send_request(command, b"")
        self.frames.take()
        block = len(headers).to_bytes(2, "little") + headers if headers else b""
        self.writer.write(frame(REQUEST, number, block + body, flags=HEADERS if headers else 0, command=command))
        (answer,) = await self.answers(number)
        return answer


async def test_newer_client_works_and_unknown_calls_and_fields_are_refused_by_name(rig: Rig) -> None:
    get = codec.encode(GetTopic("jobs"))
    async with NewerClient(rig.target) as client:
        assert client.frames.welcome is not None
        assert client.frames.welcome.version == 1
        assert "zstd-3" not in client.frames.welcome.features
        answer = await client.answer(0x09, get, msgspec.msgpack.encode({"timeout": 9.0, **LATER}))
        assert isinstance(answer, Response)
        assert codec.decode_result(answer.body, GetTopic).name == "jobs"
        for command, body, name in ((0x09, with_more(get), "later"), (0x3FFF, get, "0x3fff")):
            refused = await client.answer(command, body)
            assert isinstance(refused, Error)
            assert isinstance(refused.error, BadRequest)
            assert name in str(refused.error)
        assert isinstance(await client.answer(0x09, get), Response), "the connection continues"


async def test_client_works_with_a_newer_server(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, result, error = server.encode, codec.encode_result, codec.encode_error
    sent: list[bytes] = []

    def welcome(value: Any) -> bytes:
        sent.append(with_more(encode(value)))
        return sent[-1]

    monkeypatch.setattr(server, "encode", welcome)
    monkeypatch.setattr(codec, "encode_result", lambda value: with_more(result(value)) if value is not None else b"")
    monkeypatch.setattr(codec, "encode_error", lambda value: with_more(error(value)))
    async with NativeBroker(rig.target) as hl:
        id = (await hl.enqueue("jobs", b"x", headers={"a": "b"})).id
        (message,) = await hl.pop("jobs")
        assert (message.id, message.payload, message.headers) == (id, b"x", {"a": "b"})
        await message.ack()
        assert (await hl.stats("jobs")).acked_total == 1
        assert [info.name for info in await hl.list_topics()] == ["jobs"]
        with pytest.raises(TopicNotFound) as raised:
            await hl.pop("absent")
        assert raised.value.topic == "absent"
        later = msgspec.msgpack.encode({"error": "QuotaSpent", "code": "UNAVAILABLE", "text": "spent", "facts": LATER})
        monkeypatch.setattr(codec, "encode_error", lambda value: later)
        with pytest.raises(UnavailableError, match="spent"):
            await hl.pop("absent")
    assert b"later" in sent[0]
