"""SQL blocks: found by name, filled in completely, and used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import heapline.sql
from heapline.sql.statements import all_blocks, fill, parse_blocks, statement

SOURCE = Path(heapline.sql.__file__).parent


def test_blocks_are_found_by_name_without_their_semicolon() -> None:
    text = "-- A comment.\n-- name: one\nSELECT 1;\n\n-- name: two\nSELECT 2\n  FROM t;\n"
    assert parse_blocks(text, "x.sql") == {"one": "SELECT 1", "two": "SELECT 2\n  FROM t"}


@pytest.mark.parametrize(
    ("text", "why"),
    [("-- name: a\nSELECT 1;\n-- name: a\nSELECT 2;", "two blocks"), ("-- name: a\n\n-- name: b\nSELECT 1;", "empty")],
)
def test_repeated_or_empty_block_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_blocks(text, "x.sql")


def test_every_placeholder_needs_its_value_and_nothing_else() -> None:
    assert fill("DELETE FROM {table}", {"table": "t"}) == "DELETE FROM t"
    for values in ({}, {"tabel": "t"}, {"table": "t", "slot": "1"}):
        with pytest.raises(KeyError):
            fill("DELETE FROM {table}", values)


def test_unknown_statement_raises() -> None:
    with pytest.raises(KeyError):
        statement("no_such_statement")


def test_every_block_is_used_and_no_sql_is_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in SOURCE.glob("*.py"))
    unused = [name for name in all_blocks() if not re.search(rf"\"{name}\"", code)]
    assert unused == []
    assert re.findall(r"\"[^\"\n]*\b(?:INSERT INTO|DELETE FROM|UPDATE \w+ SET|TRUNCATE)\b[^\"\n]*\"", code) == []
