"""Units and blocks: they round-trip, and their layout matches the format."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import UnknownFormat
from heapline.core.record import ROW
from heapline.journal import unit as unit_module
from heapline.journal.block import ROW_BYTES, make_block, new_rows, row_checks
from heapline.journal.index import SegmentIndex
from heapline.journal.log_bounds import Watermark
from heapline.journal.sectors import all_zeros, sector_sums, sector_table
from heapline.journal.segment import SegmentHeader
from heapline.journal.unit import HEADER_BYTES, BadUnit, Frame, crc_seed, decode, parse_header, unit_nbytes
from heapline.journal.unit_planner import UnitPlanner

pytestmark = pytest.mark.usefixtures("both_accelerators")

SEED = crc_seed(7, 1)


def sealed(payloads: list[bytes], smalls: list[bytes] | None = None, events: bytes = b"e") -> tuple[bytearray, int]:
    planner = UnitPlanner(1 << 20, 1, 512, 9, 0)
    rows = new_rows(len(payloads))
    rows["id"] = np.arange(len(payloads)) + 100
    planner.add_block(make_block(rows, smalls, payloads))
    planner.add_frames([Frame(3, 40, len(payloads), events, 100)])
    unit = planner.seal(5, 6)
    assert unit is not None
    parts, crc = unit.encode(prev_crc=1, durable_end=8, flags=0, seed=SEED)
    return bytearray().join(parts), crc


@given(st.lists(st.tuples(st.binary(max_size=700), st.binary(max_size=40)), max_size=20), st.binary(max_size=600))
def test_unit_reads_back_as_written(messages: list[tuple[bytes, bytes]], events: bytes) -> None:
    payloads, smalls = [p for p, _ in messages], [s for _, s in messages]
    data, crc = sealed(payloads, smalls, events)
    header = parse_header(data, 0, SEED)
    assert header is not None
    assert header.nbytes == len(data)
    assert (header.number, header.prev_crc, header.durable_end, header.time, header.wall) == (9, 1, 8, 5, 6)
    assert header.body_crc == crc
    unit = decode(memoryview(data), header, 1, 512)
    (block,) = unit.blocks
    assert bytes(unit.payloads(block)) == b"".join(payloads)
    assert bytes(unit.smalls(block)) == b"".join(smalls)
    (frame,) = unit.frames
    assert (frame.partition, frame.first_offset, frame.row_count, frame.events) == (3, 40, len(payloads), events)
    rows = unit.rows(block)
    for index, (payload, small) in enumerate(messages):
        row, start = rows[index], block.offset + index * ROW_BYTES
        raw = bytes(data[start : start + ROW_BYTES])
        assert bytes(data[start + row["payload_at"] :][: row["payload_len"]]) == payload
        assert bytes(data[start + row["small_at"] :][: row["small_len"]]) == small
        assert row["payload_crc"] == crc32c(payload)
        assert row["crc"] == crc32c(raw[4:] + small)
        assert row_checks(raw, small)


@given(st.lists(st.integers(0, 900).flatmap(lambda n: st.binary(min_size=n, max_size=n)), min_size=1, max_size=12))
def test_sector_sums_do_not_depend_on_how_bytes_are_split(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    pad = bytes(-len(whole) % 512 or 512)
    cut = sector_table([*parts, pad], len(whole + pad) // 512)
    assert np.frombuffer(cut, "<u4").tolist() == sector_sums(whole + pad).tolist()


@pytest.mark.parametrize("sizes", [[70_000], [10, 70_000, 20], [70_000, 70_000], [100] * 300, [65_456, 5, 90_000]])
def test_unit_of_large_blocks_is_the_same_bytes_in_several_parts(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = UnitPlanner(1 << 20, 1, 512, 9, 0)
    for size in sizes:
        planner.add_block(make_block(new_rows(1), None, [np.random.default_rng(size).bytes(size)]))
    unit = planner.seal(5, 6)
    assert unit is not None
    parts, crc = unit.encode(prev_crc=1, durable_end=8, flags=0, seed=SEED)
    assert (len(parts) > 1) == (max(sizes) > 65_000)
    monkeypatch.setattr(unit_module, "WHOLE_PART_BYTES", 1 << 30)
    (joined,), same = unit.encode(prev_crc=1, durable_end=8, flags=0, seed=SEED)
    assert (b"".join(parts), crc) == (joined, same)
    header = parse_header(joined, 0, SEED)
    assert header is not None
    assert len(decode(memoryview(joined), header, 1, 512).blocks) == len(sizes)


def test_row_has_the_layout_of_the_format() -> None:
    places = {name: ROW.fields[name][1] for name in ROW.names or ()} if ROW.fields else {}
    assert ROW.itemsize == 80
    assert (places["crc"], places["payload_at"], places["key_len"]) == (0, 8, 24)
    assert (places["id"], places["due"], places["turn"]) == (32, 56, 72)


def test_block_starts_and_ends_on_positions() -> None:
    for size in range(20):
        block = make_block(new_rows(1), None, [b"x" * size])
        assert block.nbytes % 16 == 0
        assert block.nbytes - 80 - size < 16


def test_columns_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        make_block(new_rows(2), None, [b"one"])


def test_any_flipped_byte_of_a_unit_is_detected() -> None:
    data, _ = sealed([b"payload one", bytes(600), b"three"], [b"k", b"", b"headers"])
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        header = parse_header(flipped, 0, SEED)
        if at < HEADER_BYTES:
            assert header is None
        else:
            assert header is not None
            with pytest.raises(BadUnit):
                decode(memoryview(flipped), header, 1, 512)


def test_header_of_another_topic_or_segment_is_rejected() -> None:
    data, _ = sealed([b"x"])
    assert parse_header(data, 0, SEED) is not None
    assert parse_header(data, 0, crc_seed(8, 1)) is None
    assert parse_header(data, 0, crc_seed(7, 2)) is None


def test_newer_version_is_reported_as_such_not_as_damage() -> None:
    data, _ = sealed([b"x"])
    data[4] = 2
    data[60:64] = crc32c(bytes(data[:60]), SEED).to_bytes(4, "little")
    with pytest.raises(UnknownFormat) as caught:
        parse_header(data, 0, SEED, "file")
    assert caught.value.version == 2


def test_unit_size_includes_its_table_and_wastes_no_sector() -> None:
    for content in range(0, 5000, 7):
        sectors = unit_nbytes(content) // 512
        table_at = (64 + content + 3) & ~3
        assert table_at + 4 * (sectors + 1) <= 512 * sectors
        assert table_at + 4 * sectors > 512 * (sectors - 1)


def test_sector_sum_detects_every_flipped_bit_and_is_never_zero() -> None:
    base = bytearray(np.random.default_rng(1).bytes(512))
    (before,) = sector_sums(base).tolist()
    seen = set()
    for bit in range(512 * 8):
        base[bit // 8] ^= 1 << bit % 8
        seen.add(int(sector_sums(base)[0]))
        base[bit // 8] ^= 1 << bit % 8
    assert before not in seen
    assert sector_sums(bytes(1024)).tolist() == [1, 1]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 511])
def test_all_zeros_checks_every_byte(length: int) -> None:
    assert all_zeros(bytes(length))
    for at in range(length):
        data = bytearray(length)
        data[at] = 1
        assert not all_zeros(data)


def test_bytes_of_a_version_never_change() -> None:
    """If this fails the format changed: bump the version, keep the old reader, keep old files as fixtures."""
    data, _ = sealed([b"payload one", bytes(600), b"three"], [b"k", b"", b"headers"], b"events")
    header = SegmentHeader(3, 64 << 20, 7, 9, 0x1234, 1_700_000_000_000).pack()
    mark = Watermark(8, 9, 3, 4096, 5, 7, True).pack()
    index = SegmentIndex(3)
    index.add(9, 512, 5, 6, [Frame(3, 40, 3, b"events", 100)])
    found = [sha256(b).hexdigest()[:16] for b in (data, header, mark, index.pack(7))]
    assert found == ["0eea8429faad135b", "1e224e9aa8f0c6e5", "448b83e97b555344", "fdbee97ed3887550"]
