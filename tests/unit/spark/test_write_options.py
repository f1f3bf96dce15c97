"""Options of a write: mistakes are reported on the driver, with advice."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.contract.errors import BadRequest, RequestError
from heapline.spark.prepared_batches import stream_batch, write_batch
from heapline.spark.write_options import COLUMNS, parse_write

PLAIN = {"value": "binary"}


def parsed(
    options: dict[str, str] | None = None, columns: dict[str, str] | None = None, streaming: bool = False,
    overwrite: bool = False,
) -> Any:  # fmt: skip
    return parse_write({"topic": "t", **(options or {})}, columns or PLAIN, streaming=streaming, overwrite=overwrite)


def test_write_option_names_ignore_case() -> None:
    found = parse_write(
        {"TOPIC": "default/t", "txnappid": "a", "TxnVersion": "7", "HEAPLINE.URL": "h:1"}, PLAIN, streaming=False,
        overwrite=False,
    )  # fmt: skip
    assert (found.topic, found.txn, found.target.url, found.operation) == ("t", ("a", 7), "h:1", "enqueue")


def test_key_is_not_in_the_repr_of_write_options() -> None:
    assert "s3cret" not in repr(parsed({"heapline.api_key": "s3cret"}))
    assert "s3cret" not in repr(parsed({"heapline.token": "s3cret"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "data"}, "only the server writes to a data directory; set heapline.url"),
        ({"tpoic": "x"}, "unknown option 'tpoic' for writing; use heapline.url, .* badRecordsPath"),
        ({"checkpointLocation": "x"}, "unknown option 'checkpointlocation'"),
        ({"operation": "purge"}, "operation must be one of enqueue, reschedule, cancel"),
        ({"txnAppId": "a"}, "set both txnAppId and txnVersion, or neither"),
        ({"txnVersion": "1"}, "set both txnAppId and txnVersion, or neither"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "an integer from 0"),
        ({"txnAppId": "a", "txnVersion": "1.5"}, "an integer from 0"),
        ({"txnAppId": "a", "txnVersion": "9223372036854775808"}, "an integer from 0"),
        ({"txnAppId": "", "txnVersion": "1"}, "1 to 252 bytes"),
        ({"txnAppId": "ä" * 127, "txnVersion": "1"}, "1 to 252 bytes"),
        ({"failOnMissing": "true"}, "is only valid with operation=reschedule or cancel"),
        ({"badRecordsPath": " "}, "is empty"),
        ({"topic": "no topic"}, "'no topic'"),
    ],
)
def test_invalid_option_is_rejected(options: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parsed(options)


def test_stream_accepts_sparks_options_and_rejects_transactions() -> None:
    assert parsed({"checkpointLocation": "x", "queryName": "q"}, streaming=True).txn is None
    with pytest.raises(BadRequest, match="exactly once without txnAppId"):
        parsed({"txnAppId": "a", "txnVersion": "1"}, streaming=True)


@pytest.mark.parametrize(("streaming", "word"), [(False, "overwrite"), (True, "complete")])
def test_overwrite_mode_is_rejected(streaming: bool, word: str) -> None:
    with pytest.raises(BadRequest, match=f'{word}.*use "append"'):
        parsed(streaming=streaming, overwrite=True)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"priority": "int"}, "column value is missing"),
        ({"value": "int"}, "column value must be binary or string, not int; cast it"),
        (
            {**PLAIN, "offset": "bigint"},
            "unknown column 'offset' for operation=enqueue; select and rename columns to value, topic, priority",
        ),
        ({**PLAIN, "priority": "double"}, "column priority must be a whole number, not double"),
        ({**PLAIN, "deliver_at": "timestamp_ntz"}, "column deliver_at must be timestamp"),
        ({**PLAIN, "deliver_at": "timestamp", "delay": "int"}, "deliver_at or a column delay, not both"),
        ({**PLAIN, "headers": "map<string,int>"}, "column headers must be array"),
        ({**PLAIN, "idempotency_key": "binary"}, "column idempotency_key must be string"),
    ],
)
def test_invalid_column_is_rejected(columns: dict[str, str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parsed(columns=columns)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("value", "string"), ("priority", "tinyint"), ("key", "binary"), ("delay", "decimal(3,1)"), ("ttl", "double"),
        ("headers", "array<struct<key:string,value:binary>>"), ("headers", "map<string,string>"), ("topic", "string"),
        ("deliver_at", "timestamp"), ("fairness_key", "string"),
    ],
)  # fmt: skip
def test_every_valid_column_type_is_accepted(name: str, kind: str) -> None:
    assert name in parsed(columns={**PLAIN, name: kind}).columns


def test_topic_is_an_option_or_a_column() -> None:
    with pytest.raises(BadRequest, match="option topic or add a column topic"):
        parse_write({}, PLAIN, streaming=False, overwrite=False)
    assert parse_write({}, {**PLAIN, "topic": "string"}, streaming=False, overwrite=False).topic is None


@pytest.mark.parametrize(
    ("operation", "columns", "said"),
    [
        (
            "cancel",
            {"value": "binary"},
            "unknown column 'value' for operation=cancel; select and rename columns to message_id, id, topic",
        ),
        ("cancel", {"topic": "string"}, "needs exactly one of the columns message_id"),
        ("cancel", {"message_id": "string", "id": "bigint"}, "exactly one of the columns"),
        ("reschedule", {"id": "bigint"}, "nothing to change"),
    ],
)
def test_operation_rejects_other_columns(operation: str, columns: dict[str, str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parsed({"operation": operation}, columns)
    with pytest.raises(BadRequest, match="can be repeated without txnAppId"):
        parsed({"operation": "cancel", "txnAppId": "a", "txnVersion": "0"}, {"id": "bigint"})
    assert set(COLUMNS) == {"enqueue", "reschedule", "cancel"}


def test_stream_batch_needs_query_and_batch_id() -> None:
    assert stream_batch("q", "7") == stream_batch("q", 7)
    assert (stream_batch("q", "7").sink, stream_batch("q", "7").version) == ("query:q", 7)
    assert len({stream_batch(q, n).id for q in ("a", "b") for n in range(3)}) == 6
    for query, batch in ((None, "1"), ("", "1"), ("q", None)):
        with pytest.raises(BadRequest, match="cannot be written exactly once"):
            stream_batch(query, batch)


def test_batch_id_is_stable_only_with_a_transaction() -> None:
    assert write_batch(("app/with: anything?", 3)) == write_batch(("app/with: anything?", 3))
    assert write_batch(("a", 3)).sink == "txn:a@*"
    assert write_batch(None).sink is None
    assert write_batch(None) != write_batch(None)
    assert len(write_batch(("ä" * 126, 1 << 62)).id.encode()) < 256


def test_each_topic_has_its_own_versions_under_one_app_id() -> None:
    """As Delta's tables do: or the second write of a foreachBatch would be taken for a repeat, and be lost."""
    to = [write_batch(("app", 7), topic) for topic in ("left", "right", "ns/left", None)]
    assert len({batch.id for batch in to}) == len({batch.sink for batch in to}) == 4
    assert write_batch(("a@b", 0)).sink != write_batch(("a", 0), "b").sink
    long = [write_batch((app, 0), "n" * 127 + "/" + "x" * 127 + end).sink for app in ("ä" * 126, "app") for end in "ab"]
    assert len(set(long)) == 4
    assert all(len((sink or "").encode()) <= 256 for sink in long)
    assert all((sink or "").startswith("txn:app@") for sink in long[2:]), "as jobs do for theirs"
