"""What may be said about a write: everything wrong is told on the driver, with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from heapline.errors import BadRequest, RequestError
from heapline.spark.write_options import COLUMNS, parse_write
from heapline.spark.writing import stream_batch, write_batch

PLAIN = {"value": "binary"}


def parsed(
    options: dict[str, str] | None = None, columns: dict[str, str] | None = None, streaming: bool = False,
    overwrite: bool = False,
) -> Any:  # fmt: skip
    return parse_write({"topic": "t", **(options or {})}, columns or PLAIN, streaming=streaming, overwrite=overwrite)


def test_names_of_options_may_be_written_in_any_case() -> None:
    found = parse_write(
        {"TOPIC": "default/t", "txnappid": "a", "TxnVersion": "7", "HEAPLINE.URL": "h:1"}, PLAIN, streaming=False,
        overwrite=False,
    )  # fmt: skip
    assert (found.topic, found.txn, found.target.url, found.operation) == ("t", ("a", 7), "h:1", "enqueue")


def test_key_is_in_no_picture_of_the_options() -> None:
    assert "s3cret" not in repr(parsed({"heapline.api_key": "s3cret"}))
    assert "s3cret" not in repr(parsed({"heapline.token": "s3cret"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "data"}, "a directory has one writer, its server: give heapline.url"),
        ({"tpoic": "x"}, "no option 'tpoic' for writing; there are heapline.url, .* badRecordsPath"),
        ({"checkpointLocation": "x"}, "no option 'checkpointlocation'"),
        ({"operation": "purge"}, "operation is one of enqueue, reschedule, cancel"),
        ({"txnAppId": "a"}, "go together"),
        ({"txnVersion": "1"}, "go together"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "whole number from 0"),
        ({"txnAppId": "a", "txnVersion": "1.5"}, "whole number from 0"),
        ({"txnAppId": "a", "txnVersion": "9223372036854775808"}, "whole number from 0"),
        ({"txnAppId": "", "txnVersion": "1"}, "1 to 252 bytes"),
        ({"txnAppId": "ä" * 127, "txnVersion": "1"}, "1 to 252 bytes"),
        ({"failOnMissing": "true"}, "goes with operation=reschedule or cancel"),
        ({"badRecordsPath": " "}, "is empty"),
        ({"topic": "no topic"}, "'no topic'"),
    ],
)
def test_bad_option_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parsed(options)


def test_stream_has_sparks_own_options_and_no_transaction() -> None:
    assert parsed({"checkpointLocation": "x", "queryName": "q"}, streaming=True).txn is None
    with pytest.raises(BadRequest, match="by itself: leave txnAppId"):
        parsed({"txnAppId": "a", "txnVersion": "1"}, streaming=True)


@pytest.mark.parametrize(("streaming", "word"), [(False, "overwrite"), (True, "complete")])
def test_what_is_in_the_queue_is_not_overwritten(streaming: bool, word: str) -> None:
    with pytest.raises(BadRequest, match=f'{word}.*use "append"'):
        parsed(streaming=streaming, overwrite=True)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"priority": "int"}, "there is no column value"),
        ({"value": "int"}, "column value is binary or string, not int: cast it"),
        ({**PLAIN, "offset": "bigint"}, "no column 'offset' for operation=enqueue; there are value, topic, priority"),
        ({**PLAIN, "priority": "double"}, "column priority is a whole number, not double"),
        ({**PLAIN, "deliver_at": "timestamp_ntz"}, "column deliver_at is timestamp"),
        ({**PLAIN, "deliver_at": "timestamp", "delay": "int"}, "deliver_at or a column delay, not both"),
        ({**PLAIN, "headers": "map<string,int>"}, "column headers is array"),
        ({**PLAIN, "idempotency_key": "binary"}, "column idempotency_key is string"),
    ],
)
def test_bad_column_is_refused(columns: dict[str, str], said: str) -> None:
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
def test_column_of_any_good_type_is_taken(name: str, kind: str) -> None:
    assert name in parsed(columns={**PLAIN, name: kind}).columns


def test_topic_comes_from_an_option_or_from_a_column() -> None:
    with pytest.raises(BadRequest, match="option topic, or a column topic"):
        parse_write({}, PLAIN, streaming=False, overwrite=False)
    assert parse_write({}, {**PLAIN, "topic": "string"}, streaming=False, overwrite=False).topic is None


@pytest.mark.parametrize(
    ("operation", "columns", "said"),
    [
        ("cancel", {"value": "binary"}, "no column 'value' for operation=cancel; there are message_id, id, topic"),
        ("cancel", {"topic": "string"}, "needs a column message_id"),
        ("cancel", {"message_id": "string", "id": "bigint"}, "one of them"),
        ("reschedule", {"id": "bigint"}, "nothing to change"),
    ],
)
def test_operation_says_which_columns_it_takes(operation: str, columns: dict[str, str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parsed({"operation": operation}, columns)
    with pytest.raises(BadRequest, match="as it is: leave"):
        parsed({"operation": "cancel", "txnAppId": "a", "txnVersion": "0"}, {"id": "bigint"})
    assert set(COLUMNS) == {"enqueue", "reschedule", "cancel"}


def test_batch_of_a_stream_is_named_by_query_and_number_and_never_guessed() -> None:
    assert stream_batch("q", "7") == stream_batch("q", 7)
    assert (stream_batch("q", "7").sink, stream_batch("q", "7").version) == ("query:q", 7)
    assert len({stream_batch(q, n).id for q in ("a", "b") for n in range(3)}) == 6
    for query, batch in ((None, "1"), ("", "1"), ("q", None)):
        with pytest.raises(BadRequest, match="cannot be written exactly once"):
            stream_batch(query, batch)


def test_batch_with_a_transaction_has_one_name_and_without_one_never_the_same() -> None:
    assert write_batch(("app/with: anything?", 3)) == write_batch(("app/with: anything?", 3))
    assert write_batch(("a", 3)).sink == "txn:a@*"
    assert write_batch(None).sink is None
    assert write_batch(None) != write_batch(None)
    assert len(write_batch(("ä" * 126, 1 << 62)).id.encode()) < 256


def test_each_topic_has_versions_of_its_own_under_one_transaction_name() -> None:
    """As Delta's tables do: or the second write of a foreachBatch would be taken for a repeat, and be lost."""
    to = [write_batch(("app", 7), topic) for topic in ("left", "right", "ns/left", None)]
    assert len({batch.id for batch in to}) == len({batch.sink for batch in to}) == 4
    assert write_batch(("a@b", 0)).sink != write_batch(("a", 0), "b").sink
    long = [write_batch((app, 0), "n" * 127 + "/" + "x" * 127 + end).sink for app in ("ä" * 126, "app") for end in "ab"]
    assert len(set(long)) == 4
    assert all(len((sink or "").encode()) <= 256 for sink in long)
    assert all((sink or "").startswith("txn:app@") for sink in long[2:]), "as jobs look for theirs"
