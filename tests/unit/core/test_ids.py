import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, ResourceExhausted
from heapline.contract.ids import EPOCH_2024_MS, ID_MAX, SUFFIX_MAX, from_ulid, parse_id, to_ulid, to_ulids
from heapline.core.ids import PARTITIONS_MAX, IdMaker, partition_of, unix_ms_of

NOW = EPOCH_2024_MS + 50_000_000_000
LAST_MS = EPOCH_2024_MS + (1 << 41) - 1
ids_of_any_kind = st.integers(0, ID_MAX)


def test_id_holds_time_partition_and_a_sequence_from_zero() -> None:
    (first,) = IdMaker(7).take(1, NOW).tolist()
    assert first == (50_000_000_000 << 22) | (7 << 12)
    assert unix_ms_of(first) == NOW
    assert partition_of(first) == 7


def test_full_sequence_carries_into_the_next_millisecond() -> None:
    ids = IdMaker(3).take(4096 * 2 + 1, NOW)
    assert unix_ms_of(ids)[[0, 4095, 4096, 8191, 8192]].tolist() == [NOW, NOW, NOW + 1, NOW + 1, NOW + 2]
    assert (partition_of(ids) == 3).all()
    assert (np.diff(ids) > 0).all()


def test_clock_set_back_never_repeats_an_id() -> None:
    maker = IdMaker(1)
    before = maker.take(10, NOW)
    after = maker.take(10, NOW - 3_600_000)
    assert after[0] > before[-1]
    assert (unix_ms_of(after) == NOW).all()


def test_ids_continue_above_the_last_after_a_restart_with_a_slow_clock() -> None:
    maker = IdMaker(1)
    made = maker.take(4096, NOW)
    assert maker.last == made[-1]
    restarted = IdMaker(1, maker.last)
    assert restarted.take(1, 0)[0] > made[-1]
    assert unix_ms_of(restarted.last) == NOW + 1


def test_first_id_before_the_epoch_is_not_zero() -> None:
    assert IdMaker(0).take(1, 0)[0] == 1


def test_taking_nothing_changes_nothing() -> None:
    maker = IdMaker(0)
    assert len(maker.take(0, NOW)) == 0
    assert maker.last == 0


@given(
    st.integers(0, PARTITIONS_MAX - 1),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(-5, 5), st.booleans()), max_size=12),
)
def test_ids_strictly_increase_over_any_clock_burst_and_restart(
    partition: int, steps: list[tuple[int, int, bool]]
) -> None:
    maker, now, seen = IdMaker(partition), NOW, [0]
    for n, clock_step, restart in steps:
        now += clock_step
        ids = maker.take(n, now)
        assert (partition_of(ids) == partition).all()
        assert (unix_ms_of(ids) >= now).all()
        seen += ids.tolist()
        assert maker.last == seen[-1]
        if restart:
            maker = IdMaker(partition, maker.last)
    assert all(a < b for a, b in itertools.pairwise(seen))


def test_observed_id_is_never_reused_and_a_lower_one_changes_nothing() -> None:
    ahead = IdMaker(2).take(5, NOW + 1000)
    maker = IdMaker(2)
    maker.observe(int(ahead[-1]))
    maker.observe(int(ahead[0]))
    assert maker.take(1, NOW)[0] == ahead[-1] + 1


def test_id_of_another_partition_is_refused_as_last() -> None:
    with pytest.raises(BadRequest):
        IdMaker(2, int(IdMaker(3).take(1, NOW)[0]))


@pytest.mark.parametrize("partition", [-1, PARTITIONS_MAX])
def test_partition_number_out_of_range_is_rejected(partition: int) -> None:
    with pytest.raises(BadRequest):
        IdMaker(partition)


def test_end_of_time_is_refused_rather_than_wrapped() -> None:
    maker = IdMaker(1023)
    assert maker.take(4096, LAST_MS)[-1] == ID_MAX
    with pytest.raises(ResourceExhausted):
        maker.take(1, LAST_MS)
    assert maker.last == ID_MAX


suffixes = st.integers(0, SUFFIX_MAX) | st.sampled_from((0, 1, 1 << 54, 1 << 55, SUFFIX_MAX - 1, SUFFIX_MAX))


@given(ids_of_any_kind, suffixes)
def test_ulid_decodes_to_the_same_id_and_suffix_in_either_case(message_id: int, suffix: int) -> None:
    text = to_ulid(message_id, suffix)
    assert len(text) == 26
    assert from_ulid(text) == from_ulid(text.lower()) == parse_id(text) == (message_id, suffix)


@given(ids_of_any_kind, ids_of_any_kind, suffixes)
def test_ulids_of_a_topic_sort_as_its_ids_do(a: int, b: int, suffix: int) -> None:
    assert (to_ulid(a, suffix) < to_ulid(b, suffix)) == (a < b)


@given(st.lists(ids_of_any_kind), suffixes)
def test_batch_formats_each_id_like_a_single_one(message_ids: list[int], suffix: int) -> None:
    assert to_ulids(message_ids, suffix) == [to_ulid(i, suffix) for i in message_ids]


@pytest.mark.parametrize("suffix", [-1, 1 << 58])
def test_suffix_of_more_than_58_bits_is_refused(suffix: int) -> None:
    with pytest.raises(ValueError, match="58 bits"):
        to_ulid(5, suffix)


def test_ulid_carries_unix_time_partition_sequence_and_suffix_by_the_ulid_layout() -> None:
    message_id = int(IdMaker(0x2A5).take(0xABD, NOW)[-1])
    value = 0
    suffix = 0x2AB_CDEF_0123_4567
    for ch in to_ulid(message_id, suffix):
        value = value * 32 + "0123456789ABCDEFGHJKMNPQRSTVWXYZ".index(ch)
    assert value >> 80 == NOW
    assert value & ((1 << 80) - 1) == (0x2A5 << 70) | (0xABC << 58) | suffix


GOOD = to_ulid(int(IdMaker(5).take(3, NOW)[-1]), 99)


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD[:-1],
        GOOD + "0",
        "U" + GOOD[1:],
        "I" + GOOD[1:],
        GOOD[:5] + "ſ" + GOOD[6:],  # its upper case is S
        GOOD[:5] + "٣" + GOOD[6:],
        GOOD[:5] + " " + GOOD[6:],
        "0" * 26,  # 1970
        "7" + "Z" * 9 + "0" * 16,  # past 41 bits
        "Z" * 10 + "0" * 16,  # past 48 bits
    ],
)
def test_malformed_ulid_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        from_ulid(text)


@given(st.text(max_size=30) | st.text("0123456789abcdefghjkmnpqrstvwxyz", min_size=26, max_size=26))
def test_any_text_is_an_id_or_a_bad_request(text: str) -> None:
    try:
        found, suffix = parse_id(text)
    except BadRequest:
        return
    assert int(text) == found if suffix is None else text.upper() == to_ulid(found, suffix)


@pytest.mark.parametrize("spelling", [5, "5", "0005"])
def test_integer_spelling_is_accepted(spelling: str | int) -> None:
    assert parse_id(spelling) == (5, None)


@pytest.mark.parametrize("spelling", [-1, 1 << 63, str(1 << 63), "-1", "+1", "1_0", "", " 1", "٣", True, 1.0, None])
def test_invalid_ids_are_rejected(spelling: object) -> None:
    with pytest.raises(BadRequest):
        parse_id(spelling)
