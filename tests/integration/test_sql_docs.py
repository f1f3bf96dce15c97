"""The examples of docs/sql.md run as written, on a real PostgreSQL."""

from __future__ import annotations

from textwrap import indent

import pytest

import heapline.sql
from tests.acceptance.pages import ROOT, blocks_of
from tests.postgres import drop_schema, shared_url

asyncpg = pytest.importorskip("asyncpg")


async def test_examples_run_as_written() -> None:
    """The second one continues with the broker of the first."""
    examples = [b for b in blocks_of((ROOT / "docs" / "sql.md").read_text()) if b.language == "python"]
    assert all(b.reason for b in examples), "add a comment that says why test_docs does not run it"
    first, second = (b.body for b in examples)
    code = first.replace("postgresql://heapline@db1/queues", shared_url()) + indent(second, "    ")
    body = "\n".join(f"    {line}" for line in code.splitlines())
    program: dict[str, object] = {}
    exec(f"async def main():\n{body}\n    return message", program)
    try:
        message = await program["main"]()  # type: ignore[operator]
        assert message.payload == b"hello"
    finally:
        connection = await asyncpg.connect(shared_url())
        await drop_schema(connection, "heapline")
        await connection.close()


async def test_inspection_query_runs() -> None:
    (query,) = [b for b in blocks_of((ROOT / "docs" / "sql.md").read_text()) if b.language == "sql"]
    schema = "heapline_docs"
    async with heapline.sql.open([shared_url()], schema=schema) as hl:
        await hl.create_topic("jobs")
        await hl.enqueue("jobs", b"1")
        await hl.enqueue("jobs", b"2", delay=60)
        connection = await asyncpg.connect(shared_url())
        rows = await connection.fetch(query.body.replace("heapline.items", f"{schema}.items").rstrip().rstrip(";"))
        assert {row["status"]: row["count"] for row in rows} == {"ready": 1, "delayed": 1}
    await drop_schema(connection, schema)
    await connection.close()
