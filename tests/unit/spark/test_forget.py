"""Forgetting a key in a lake: its bytes are in no file, and all other rows are still there."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.errors import BadRequest, MessageLeased, MessageNotFound

deltalake = pytest.importorskip("deltalake")

from heapline.spark.jobs.forget import cancel_all, forget, forget_in_lake  # noqa: E402
from heapline.spark.lake.files import table_schema  # noqa: E402
from heapline.spark.lake.tables import ensure_table  # noqa: E402

NOW = datetime(2026, 1, 31, tzinfo=UTC)


def fill(lake: Path, topic: str, numbers: range) -> None:
    import pyarrow as pa

    table, schema = ensure_table(lake, "messages"), table_schema("messages")
    rows = [
        dict.fromkeys(schema.names) | {
            "key": None if n % 5 == 4 else b"customer-%d" % (n % 5), "value": b"payload of %d " % (n % 5) * 3,
            "topic": topic, "partition": 0, "offset": n, "timestamp": NOW, "timestampType": 1, "id": n,
            "headers": [{"key": "of", "value": b"header of %d" % (n % 5)}], "message_id": str(n), "priority": 1,
            "enqueued_at": NOW, "unit": n, "namespace": "default", "date": NOW.date(),
        }
        for n in numbers
    ]  # fmt: skip
    deltalake.write_deltalake(table.root, pa.Table.from_pylist(rows, schema), mode="append")


def left(lake: Path) -> list[tuple[str, int]]:
    rows = deltalake.DeltaTable(f"{lake}/messages").to_pyarrow_table(columns=["topic", "offset"]).to_pylist()
    return sorted((row["topic"], row["offset"]) for row in rows)


def lies_in(lake: Path, what: bytes) -> list[Path]:
    """Files of the lake, also those that no version of it names, with these bytes in them; packed or not."""
    return [path for path in lake.rglob("*") if path.is_file() and what in path.read_bytes() + unpacked(path)]


def unpacked(path: Path) -> bytes:
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        return b""
    return repr(pq.ParquetFile(path).read(columns=["key", "value", "headers"]).to_pylist()).encode()


def test_forget_removes_only_the_bytes_of_the_key_from_the_lake(tmp_path: Path) -> None:
    for numbers in (range(10), range(10, 20), range(20, 23)):
        fill(tmp_path, "jobs", numbers)
    deltalake.DeltaTable(f"{tmp_path}/messages").optimize.compact()  # the old files still lie there
    assert lies_in(tmp_path, b"payload of 1")
    found = forget_in_lake(tmp_path, "customer-1")
    assert found.rows == 5
    assert found.files >= 3
    assert left(tmp_path) == [("jobs", n) for n in range(23) if n % 5 != 1]
    for gone in (b"payload of 1", b"header of 1", b"customer-1", b"customer-1".hex().encode()):
        assert lies_in(tmp_path, gone) == []
    assert lies_in(tmp_path, b"payload of 2")
    assert forget_in_lake(tmp_path, "customer-1").rows == 0


def test_forget_changes_only_the_named_topics(tmp_path: Path) -> None:
    fill(tmp_path, "jobs", range(10))
    fill(tmp_path, "it's/else", range(10))
    assert forget(None, None, "customer-1", topics=["it's/else"], lake=tmp_path).lake is not None
    assert left(tmp_path) == [("it's/else", n) for n in range(10) if n % 5 != 1] + [("jobs", n) for n in range(10)]


def test_forget_keeps_files_that_an_archive_is_writing(tmp_path: Path) -> None:
    fill(tmp_path, "jobs", range(10))
    under_way = tmp_path / "messages" / "namespace=default" / "part-under-way.parquet"
    under_way.write_bytes(b"rows")
    forget_in_lake(tmp_path, "customer-1")
    assert under_way.exists()


def test_invalid_forget_is_rejected(tmp_path: Path) -> None:
    for where, key, more, why in (
        (None, "", {"lake": tmp_path}, "no key given"), (None, "k", {}, "a server, a lake, or both"),
        (None, "k", {"lake": tmp_path / "none"}, "no lake with messages exists"), ({}, "k", {}, "give a session"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=why):
            forget(None, where, key, **more)


class Client:
    def cancel(self, topic: str, id: int) -> None:
        if id == 2:
            raise MessageLeased(topic, "2")
        if id == 3:
            raise MessageNotFound(topic, "3")


def test_forget_counts_leased_but_not_removed_messages() -> None:
    client: Any = Client()
    assert cancel_all(client, "jobs", [1, 2, 3, 4]) == (2, 1)
