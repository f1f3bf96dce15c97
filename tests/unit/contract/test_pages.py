"""Pages: bounded in rows and bytes, in order, each item once."""

from __future__ import annotations

from typing import get_origin

import msgspec
import pytest

from heapline.contract import broker as _every_call  # noqa: F401  (registers the calls)
from heapline.contract.call import CALLS, PAGE_BYTES, Page, cursor_of, page_of, read_page
from heapline.contract.errors import BadRequest
from heapline.contract.groups import ListGroups
from heapline.testing import MemoryBroker


class Item(msgspec.Struct):
    name: str
    filling: bytes = b""


def test_page_has_at_most_its_bytes_and_at_least_one_item() -> None:
    items = [Item(str(i), bytes(PAGE_BYTES // 3)) for i in range(5)]
    first = page_of(items, None, 1000)
    assert [item.name for item in first.items] == ["0", "1"]
    assert len(msgspec.msgpack.encode(first.items)) <= PAGE_BYTES + 5
    assert [item.name for item in page_of(items, first.cursor, 1000).items] == ["2", "3"]
    large = page_of([Item("a", bytes(2 * PAGE_BYTES)), Item("b")], None, 1000)
    assert [item.name for item in large.items] == ["a"]
    assert [item.name for item in page_of([Item("a"), Item("b")], large.cursor, 1000).items] == ["b"]


def test_page_has_at_most_its_rows_in_order_of_the_key() -> None:
    items = [Item(name) for name in "dbca"]
    first = page_of(items, None, 3)
    assert [item.name for item in first.items] == ["a", "b", "c"]
    last = page_of(items, first.cursor, 3)
    assert ([item.name for item in last.items], last.cursor) == (["d"], None)


@pytest.mark.parametrize("cursor", ["!", cursor_of(7), cursor_of("a")[:-1]])
def test_invalid_cursor_is_rejected(cursor: str) -> None:
    with pytest.raises(BadRequest, match="cursor must be one that the previous page returned"):
        page_of([Item("a")], cursor, 3)


async def test_page_read_one_by_one_omits_missing_items() -> None:
    async def read(name: str) -> Item | None:
        return None if name == "b" else Item(name)

    first = await read_page(["a", "b", "c", "d"], None, 2, read)
    assert [item.name for item in first.items] == ["a", "c"]
    assert [item.name for item in (await read_page(["a", "b", "c", "d"], first.cursor, 2, read)).items] == ["d"]


def test_every_list_is_a_page_with_a_cursor_and_a_limit() -> None:
    for kind in CALLS.values():
        is_page = get_origin(kind.result) is Page or "cursor" in getattr(kind.result, "__struct_fields__", ())
        assert is_page == ("cursor" in kind.__struct_fields__), kind
        if is_page:
            assert "limit" in kind.__struct_fields__, kind
        elif kind.__name__.startswith("List"):
            pytest.fail(f"{kind.__name__} is not a page")


async def test_groups_of_many_partitions_come_in_pages_of_bounded_size() -> None:
    async with MemoryBroker() as broker:
        await broker.create_topic("jobs", partitions=1024)
        for i in range(20):
            await broker.create_group("jobs", f"group-{i:02}")
        page = await broker.do(ListGroups("jobs"))
        assert page.cursor is not None
        assert len(msgspec.msgpack.encode(page.items)) <= PAGE_BYTES + 5
        assert [group.name for group in await broker.list_groups("jobs")] == [f"group-{i:02}" for i in range(20)]
