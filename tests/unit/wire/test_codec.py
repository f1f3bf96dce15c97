"""Values that msgspec does not support survive msgpack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import heapline
from heapline.contract.call import Count
from heapline.contract.columns import pack
from heapline.contract.errors import BadRequest, LeaseLost, UnavailableError
from heapline.contract.groups import FetchedRows, PartitionBatch, StreamRows
from heapline.contract.leases import Ack, LeaseKeys
from heapline.contract.log import PinState, ReadLog, ReadUnits
from heapline.contract.message import LogEvent, LogFrame, Outgoing
from heapline.contract.messages import Enqueue, EnqueuedBatch, RowError
from heapline.contract.replays import Replay
from heapline.contract.stream import Payloads
from heapline.contract.topics import PauseTopic, Purge
from heapline.wire.codec import (
    decode,
    decode_call,
    decode_error,
    decode_result,
    encode,
    encode_error,
    encode_failure,
    encode_result,
    waiting_commands,
)
from tests.unit.wire.calls import same


def test_error_of_a_row_survives() -> None:
    batch = EnqueuedBatch(pack([1, 0]), errors=[RowError(1, LeaseLost([5], "jobs"))])
    assert same(decode(encode(batch), EnqueuedBatch), batch)


def test_payloads_that_share_a_buffer_become_a_list() -> None:
    payloads: Any = Payloads(memoryview(b"abcde"), np.array([0, 3]), np.array([3, 5]))
    rows = StreamRows(pack([1, 2]), pack([4, 5]), payloads, pack([0, 0]), pack([1, 1], "B"), pack([0, 0]))
    again = decode(encode(FetchedRows("jobs", 1, [0], [PartitionBatch(0, rows)])), FetchedRows)
    assert again.batches[0].rows.payloads == [b"abc", b"de"]


def test_columns_are_binary_fields() -> None:
    command = Ack("jobs", LeaseKeys(pack([1]), pack([2])))
    assert same(decode(encode(command), Ack), command)


@pytest.mark.parametrize("value", [object(), {"a": object()}])
def test_unknown_value_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot encode object"):
        encode(value)


DEEP = b"\x91" * 100_000 + b"\xc0"  # lists in lists


@pytest.mark.parametrize(
    "body",
    [
        DEEP,
        b"\x82\xa5topic\xa4jobs\xa7unknown" + DEEP,
        b"\x83\xa5topic\xa4jobs\xa7payload\xc4\x00\xa7headers" + DEEP,
        b"\x82\xa5topic\xa4\xff\xff\xff\xff\xa7payload\xc4\x00",
        b"",
    ],
    ids=["nested", "nested in an unknown field", "nested in a field", "not UTF-8", "empty"],
)
def test_call_that_cannot_be_decoded_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest, match="cannot decode the request as Enqueue"):
        decode_call(body, Enqueue)


# -- the native wire -------------------------------------------------------------------------------------------------


def test_no_result_is_an_empty_body() -> None:
    assert encode_result(None) == b""
    assert decode_result(b"", PauseTopic) is None
    assert decode_result(memoryview(encode_result(Count(3))), Purge) == Count(3)
    with pytest.raises(UnavailableError, match="answer to Purge cannot be decoded") as refused:
        decode_result(b"", Purge)
    assert isinstance(refused.value.__cause__, msgspec.DecodeError)


def test_error_survives_with_its_code() -> None:
    error = decode_error(encode_error(LeaseLost([5], "jobs")))
    assert same(error, LeaseLost([5], "jobs"))
    assert str(decode_error(encode_failure("INTERNAL", "see the log"))) == "see the log"


def test_feeds_and_calls_that_wait_count_as_waiting() -> None:
    assert waiting_commands() >= {0x20, 0x56, 0x60, 0x71, 0x73, 0x74}
    assert not waiting_commands() & {0x10, 0x11, 0x21}


def test_columns_of_the_log_are_packed() -> None:
    columns = {
        "ids": np.arange(1000) + (1 << 60),
        "big_endian": np.arange(3, dtype=">i4"),
        "inner": {"flags": np.ones(2, dtype="u1"), "names": ["a", "b"]},
        "count": np.int64(4),
        "texts": ["x", None],
    }
    event = LogEvent(kind="leased", offset=0, row_count=1, columns=columns)
    frame = LogFrame(topic="jobs", partition=0, unit=1, offset=0, row_count=1, time_ms=5, wall_ms=6, events=[event])
    data = encode_result(frame)
    assert columns["ids"].astype("<i8").tobytes() in data  # type: ignore[attr-defined]
    again = decode_result(data, ReadLog).events[0].columns
    assert again["ids"].tolist() == columns["ids"].tolist()  # type: ignore[attr-defined]
    assert again["big_endian"].tolist() == [0, 1, 2]
    assert again["inner"]["flags"].dtype == np.uint8
    assert (again["inner"]["names"], again["count"], again["texts"]) == (["a", "b"], 4, ["x", None])


async def test_items_of_every_feed_survive(tmp_path: Path) -> None:
    feeds = [ReadLog("jobs"), ReadUnits("jobs", 0, 1 << 40), PinState("jobs"), Replay("jobs")]
    async with heapline.open(tmp_path) as broker:
        await broker.create_topic("jobs", streams=True)
        await broker.enqueue_batch("jobs", [Outgoing(b"a", key="k", headers={"h": "v"}), Outgoing(b"b", delay=60)])
        await broker.ack(await broker.pop("jobs"))
        for feed in feeds:
            items = [item async for item in broker.stream(feed)]
            assert items, feed
            for item in items:
                again = decode_result(encode_result(item), type(feed))
                assert same(encode_result(again), encode_result(item))
                assert isinstance(again, type(item))
                if isinstance(item, LogFrame):
                    assert all(map(same, again.events, item.events))
