"""Values that msgspec does not know survive msgpack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from heapline.contract.columns import pack
from heapline.contract.errors import BadRequest, LeaseLost
from heapline.contract.groups import FetchedRows, PartitionBatch, StreamRows
from heapline.contract.leases import Ack, LeaseKeys
from heapline.contract.messages import Enqueue, EnqueuedBatch, RowError
from heapline.contract.stream import Payloads
from heapline.wire.codec import decode, decode_call, encode
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
