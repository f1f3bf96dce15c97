"""Operations: the meaning of each row, and the outcome for removed or leased messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from heapline.contract.errors import BadRequest, HeaplineError
from heapline.contract.ids import to_ulid
from heapline.spark.sink import Changed, MessagesMissing, _chunks, _parse_row, _run
from heapline.spark.write_options import WriteOptions, parse_write
from heapline.testing import MemoryBroker

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def options(operation: str = "reschedule", **more: str) -> WriteOptions:
    columns = {"id": "bigint"} | ({"priority": "int"} if operation == "reschedule" else {})
    given = {"topic": "jobs", "operation": operation, **more}
    return parse_write(given, columns, streaming=False, overwrite=False)


def test_operation_row_has_an_id_and_changes() -> None:
    assert _parse_row(options(), {"id": 7, "priority": 3}) == ("jobs", 7, {"priority": 3})
    wanted = {"message_id": to_ulid(7, 99), "priority": None, "deliver_at": LATER, "topic": "other"}
    assert _parse_row(options(), wanted) == ("other", to_ulid(7, 99), {"deliver_at": LATER})
    assert _parse_row(options("cancel"), {"id": 7, "topic": None}) == ("jobs", 7, {})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": None, "priority": 1}, "message_id is null"),
        ({"id": -1, "priority": 1}, "not a message id"),
        ({"message_id": "nonsense", "priority": 1}, "not a message id"),
        ({"id": 7, "priority": None}, "nothing to change"),
        ({"id": 7, "deliver_at": datetime(1950, 1, 1, tzinfo=UTC)}, "out of range"),
    ],
)
def test_invalid_operation_row_is_rejected(row: dict[str, Any], said: str) -> None:
    with pytest.raises(HeaplineError, match=said):
        _parse_row(options(), row)


async def test_gone_and_leased_messages_are_counted() -> None:
    async with MemoryBroker() as hl:
        await hl.create_topic("jobs")
        ids = [(await hl.enqueue("jobs", b"%d" % i)).id for i in range(4)]
        (held,) = await hl.pop("jobs")
        await hl.cancel("jobs", ids[1])
        asked = [("jobs", id, {"priority": -i}) for i, id in enumerate(ids)]
        assert await _run(hl, options(), asked) == Changed(2, 1, 1)
        assert (await hl.pop("jobs"))[0].id == ids[3]
        with pytest.raises(MessagesMissing, match=r"1 message\(s\) are gone and 2 are leased .* failOnMissing=false"):
            await _run(hl, options(failOnMissing="true"), asked)
        assert await _run(hl, options("cancel"), asked) == Changed(1, 1, 2)
        await hl.ack(held)
        with pytest.raises(BadRequest):
            await _run(hl, options(), [("jobs", ids[2], {"priority": 1 << 70})])


def test_operations_are_sent_in_chunks() -> None:
    assert [len(some) for some in _chunks(range(1201))] == [500, 500, 201]
    assert sum([Changed(1, 2, 3), Changed(4, 5, 6)], Changed()) == Changed(5, 7, 9)
