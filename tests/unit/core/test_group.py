"""Consumer groups: acks in any order, redelivery, dead letters, resets, and which segments they need."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from heapline.contract.config import GroupConfig
from heapline.contract.errors import BadRequest, UnknownFormat
from heapline.core.entries import Replay
from heapline.core.events import (
    KIND_NAMES,
    GroupAcked,
    GroupDead,
    GroupDeadReplayed,
    GroupFailed,
    decode_events,
    encode_event,
)
from heapline.core.groups.group import Groups
from heapline.core.groups.stream import StreamRows
from tests.unit.core.group_model import i64, spread
from tests.unit.core.group_rig import DAY, FIRM, NOW, Rig, offsets_of, page

# -- acks ----------------------------------------------------------------------------------------------------------


def test_committed_is_the_lowest_unacked_and_the_cursor_when_all_is_acked() -> None:
    rig = Rig()
    assert rig.take(page(2, 5, 9, end=20)) == [(2, 1), (5, 1), (9, 1)]
    assert offsets_of(rig) == (2, 20)
    assert rig.ack(9) == []
    assert offsets_of(rig) == (2, 20)
    rig.ack(2)
    assert offsets_of(rig) == (5, 20)
    rig.ack(5)
    assert offsets_of(rig) == (20, 20)


def test_acks_in_order_record_one_number_and_no_ranges() -> None:
    rig = Rig()
    rig.take(page(*range(0, 3000, 3)))
    event, _ = rig.group.decide_ack("m", 0, i64(range(0, 300, 3)), NOW)
    assert event is not None
    assert (event.committed, event.count) == (300, 100)
    assert not len(event.starts)


def test_ranges_join_over_rows_that_are_not_of_the_stream() -> None:
    rig = Rig()
    rig.take(page(0, 10, 20, 30, 40))
    rig.ack(10)
    rig.ack(30)
    rig.ack(20)
    done = rig.group.partitions[0].done
    assert (done.starts.tolist(), done.ends.tolist(), done.counts.tolist()) == ([1], [40], [3])
    rig.ack(0)
    assert offsets_of(rig) == (40, 41)
    assert not len(done)


def test_repeated_ack_succeeds_and_changes_nothing() -> None:
    rig = Rig()
    rig.take(page(1, 2, 3))
    rig.ack(1, 3)
    before = len(rig.log)
    assert rig.ack(1, 3, 3) == []
    assert len(rig.log) == before


def test_ack_of_rows_not_held_is_reported_and_changes_nothing() -> None:
    rig = Rig()
    rig.take(page(1, 2, 3), credits=1)
    assert rig.ack(2, 77) == [2, 77]
    event, lost = rig.group.decide_ack("stranger", 0, i64([1]), NOW)
    assert event is None
    assert lost.tolist() == [1]


def test_credits_bound_a_delivery_and_cursor_stops_at_the_next_row() -> None:
    rig = Rig()
    assert rig.take(page(3, 6, 9), credits=2) == [(3, 1), (6, 1)]
    assert offsets_of(rig) == (3, 9)
    assert rig.take(page(3, 6, 9), credits=0) == []
    assert rig.take(page(3, 6, 9), credits=2) == [(9, 1)]


def test_page_that_omits_rows_is_refused() -> None:
    rig = Rig()
    late = StreamRows(page(7).rows, 5, 8)
    with pytest.raises(ValueError, match="does not cover the cursor"):
        rig.take(late)


def test_ten_groups_share_the_columns_of_the_rows() -> None:
    rows = page(*range(1000))
    for _ in range(10):
        rig = Rig()
        (share,) = rig.group.take("m", 500, {0: rows}, NOW)
        for mine, shared in zip(share.rows, rows.rows, strict=True):
            assert np.shares_memory(mine, shared)
        (kept,) = rig.group.partitions[0].fresh._chunks
        assert np.shares_memory(kept.rows.ids, rows.rows.ids)


# -- failures ------------------------------------------------------------------------------------------------------


def test_nacked_row_is_redelivered_after_its_backoff_before_new_rows() -> None:
    rig = Rig()
    rig.take(page(1, 2, 3, 4), credits=2)
    (event,) = rig.nack(1)
    assert isinstance(event, GroupFailed)
    assert event.dues.tolist() == [NOW + 100]
    assert rig.groups.next_deadline(NOW) == NOW + 100
    assert rig.take(page(1, 2, 3, 4), credits=1, now=NOW + 99) == [(3, 1)]
    assert rig.take(page(1, 2, 3, 4), credits=2, now=NOW + 100) == [(1, 2), (4, 1)]


def test_unacked_row_fails_at_its_deadline() -> None:
    rig = Rig()
    rig.take(page(1, 2))
    assert rig.groups.next_deadline(NOW) == NOW + 1000
    assert not len(rig.group.overdue(0, NOW + 999, 10))
    late = rig.group.overdue(0, NOW + 1000, 10)
    assert late.tolist() == [1, 2]
    for event in rig.group.decide_time_out(0, late, np.zeros(2), NOW + 1000):
        rig.record(0, event)
    assert rig.ack(1) == [1]
    assert rig.take(page(1, 2), now=NOW + 1100) == [(1, 2), (2, 2)]


def test_next_deadline_is_that_of_a_delivery_in_flight() -> None:
    rig = Rig()
    rig.take(page(1, 2), credits=1)
    rig.take(page(1, 2), credits=1, now=NOW + 50)
    late = rig.group.overdue(0, NOW + 1000, 10)
    assert late.tolist() == [1]
    for event in rig.group.decide_time_out(0, late, np.zeros(1), NOW + 1000):
        rig.record(0, event)
    assert rig.groups.next_deadline(NOW + 1000) == NOW + 1050


def test_timeouts_are_processed_in_slices() -> None:
    rig = Rig()
    rig.take(page(1, 2, 3))
    assert rig.group.overdue(0, NOW + 1000, 2).tolist() == [1, 2]


def dead_row(rig: Rig, offset: int, *others: int) -> None:
    rig.take(page(offset, *others))
    rig.nack(offset)
    rig.take(page(offset, *others), now=NOW + 100)
    (event,) = rig.nack(offset, now=NOW + 100)
    assert isinstance(event, GroupDead)


def test_row_without_retries_left_is_a_dead_letter_and_the_group_continues() -> None:
    rig = Rig()
    dead_row(rig, 1, 2)
    (letter,) = rig.group.partitions[0].dead.items()
    assert letter == (1, (101, 1 << 13, 2, "boom", NOW + 100))
    assert offsets_of(rig) == (2, 3)
    rig.ack(2)
    assert offsets_of(rig) == (3, 3)
    assert rig.group.partitions[0].lag(2) == 0


def test_dead_letter_holds_its_message_until_it_is_deleted() -> None:
    rig = Rig()
    dead_row(rig, 1)
    assert rig.groups.holds(0, NOW).ids.tolist() == [101]
    rig.record(0, rig.group.partitions[0].decide_delete_dead(i64([1]), NOW))
    assert not len(rig.groups.holds(0, NOW).ids)
    assert rig.group.partitions[0].decide_delete_dead(i64([1]), NOW) is None


def test_late_ack_of_a_dead_letter_is_reported() -> None:
    rig = Rig()
    dead_row(rig, 1)
    assert rig.ack(1) == [1]


def test_replayed_dead_letter_is_redelivered_and_moves_no_offset_back() -> None:
    rig = Rig()
    dead_row(rig, 1, 2)
    rig.ack(2)
    (event,) = rig.group.partitions[0].decide_replay_dead(i64([1]), NOW, NOW)
    assert isinstance(event, GroupDeadReplayed)
    rig.record(0, event)
    rig.reopen()
    assert rig.group.partitions[0].committed == 3
    assert rig.group.partitions[0].lag(2) == 1
    assert rig.groups.holds(0, NOW).ids.tolist() == [101]
    assert rig.take(page(1, 2)) == [(1, 1)]
    rig.ack(1)
    assert rig.group.partitions[0].lag(2) == 0
    assert not len(rig.groups.holds(0, NOW).ids)


# -- crashes and resets --------------------------------------------------------------------------------------------


def test_deliveries_cut_by_a_crash_are_repeated_without_a_failure() -> None:
    rig = Rig()
    rig.take(page(1, 2, 3, 4, 5))
    rig.ack(2, 4)
    rig.nack(5)
    rig.reopen()
    rows = rig.take(page(1, 2, 3, 4, 5), now=NOW + 100)
    assert rows == [(5, 2), (1, 1), (3, 1)]
    rig.ack(5, 1, 3)
    assert offsets_of(rig) == (6, 6)


def test_lag_is_known_after_a_crash_before_any_row_is_read() -> None:
    rig = Rig()
    rig.take(page(*range(0, 40, 4)))
    rig.ack(0, 4, 12, 20)
    rig.nack(8)
    rig.reopen()
    assert rig.group.partitions[0].lag(10) == 6


def test_ack_next_to_a_done_range_counts_its_rows_once() -> None:
    rig = Rig()
    rig.take(page(0, 1, 2, 3, 4, 5))
    rig.ack(3, 4)
    rig.nack(5)
    rig.reopen()
    assert rig.take(page(0, 1, 2), now=NOW + DAY) == [(5, 2), (0, 1), (1, 1), (2, 1)]
    assert rig.group.partitions[0].cursor == 5
    # One ack moves the committed offset to 5, where the done range [3, 5) ends, and adds the range [5, 6).
    assert rig.ack(0, 1, 2, 5, now=NOW + DAY) == []
    offsets = rig.group.partitions[0]
    assert (offsets.committed, offsets.count, offsets.lag(6)) == (6, 6, 0)
    rig.reopen()
    assert rig.group.partitions[0].lag(6) == 0


def test_snapshot_restores_the_groups() -> None:
    rig = Rig()
    dead_row(rig, 1, 2, 3, 4)
    rig.ack(3)
    rig.nack(4)
    state = msgspec.msgpack.encode(rig.groups.to_state())
    again = Groups.from_state(msgspec.msgpack.decode(state))
    assert msgspec.msgpack.encode(again.to_state()) == state
    rig.groups = again
    rig.groups.opened(NOW)
    assert rig.take(page(1, 2, 3, 4), now=NOW + 100) == [(4, 2), (2, 1)]


def test_snapshot_of_a_newer_version_is_refused() -> None:
    with pytest.raises(UnknownFormat):
        Groups.from_state({"version": 2, "groups": []})


def test_reset_redelivers_from_the_offset_and_forgets_failures() -> None:
    rig = Rig()
    rig.take(page(1, 2, 3))
    rig.ack(1)
    rig.nack(2)
    rig.record(0, rig.group.partitions[0].decide_reset(1, 0, NOW))
    assert offsets_of(rig) == (1, 1)
    assert rig.ack(3) == [3]
    assert rig.take(page(1, 2, 3)) == [(1, 1), (2, 1), (3, 1)]


def test_reset_forward_skips_the_rows_between() -> None:
    rig = Rig()
    rig.take(page(1, 2, 3), credits=1)
    rig.record(0, rig.group.partitions[0].decide_reset(3, 2, NOW))
    assert rig.group.partitions[0].lag(3) == 1
    assert rig.take(page(1, 2, 3)) == [(3, 1)]


def test_event_of_an_unknown_group_is_reported() -> None:
    nothing = i64([])
    with pytest.raises(Replay, match="group_acked of group 'ghost'"):
        Groups().apply(0, GroupAcked("ghost", 1, 1, nothing, nothing, nothing, nothing, NOW))


# -- what is held --------------------------------------------------------------------------------------------------


def test_group_without_members_holds_the_journal_for_seven_days() -> None:
    rig = Rig(GroupConfig(), member=None)
    assert rig.groups.holds_below(0, NOW + 7 * DAY - 1) == 0
    assert rig.groups.holds_below(0, NOW + 7 * DAY) is None


def test_group_with_members_holds_the_journal_forever() -> None:
    assert Rig().groups.holds_below(0, NOW + 1000 * DAY) == 0


def test_slowest_group_decides_what_the_journal_keeps() -> None:
    rig = Rig()
    for p, event in Groups.decide_create("fast", FIRM, [(0, 50, 50)], NOW):
        rig.record(p, event)
    assert rig.groups.holds_below(0, NOW) == 0
    rig.take(page(99, end=100))
    rig.ack(99)
    assert rig.groups.holds_below(0, NOW) == 50


def test_observer_shows_lag_and_holds_nothing() -> None:
    rig = Rig(GroupConfig(observer=True), member=None)
    assert rig.groups.holds_below(0, NOW) is None
    assert rig.group.holds(0, NOW) is None
    rig.record(0, rig.group.partitions[0].decide_reset(10, 4, NOW))
    assert rig.group.partitions[0].lag(9) == 5
    with pytest.raises(BadRequest, match="observer"):
        rig.group.decide_join("m", spread, NOW)


def test_deleted_group_holds_nothing() -> None:
    rig = Rig(partitions=3)
    for p, event in rig.groups.decide_delete("g", NOW):
        rig.record(p, event)
    assert len(rig.groups) == 0
    assert rig.groups.holds_below(0, NOW) is None


def test_group_with_an_invalid_setting_is_rejected() -> None:
    with pytest.raises(BadRequest, match="ack_timeout"):
        Groups.decide_create("g", GroupConfig(ack_timeout=0), [(0, 0, 0)], NOW)


def test_moved_records_are_delivered_from_their_new_position() -> None:
    rig = Rig()
    dead_row(rig, 1, 2, 3)
    rig.nack(2, now=NOW)
    rig.groups.moved(0, i64([103, 101, 102]), i64([3000, 1000, 2000]))
    offsets = rig.group.partitions[0]
    assert offsets.dead[1].position == 1000
    assert offsets.failed.positions.tolist() == [2000]
    assert offsets.fresh.columns(i64([3])).positions.tolist() == [3000]


@pytest.mark.parametrize("kind", sorted({name for name in KIND_NAMES.values() if name.startswith("group_")}))
def test_every_event_of_groups_is_read_back_as_it_was(kind: str) -> None:
    rig = Rig()
    dead_row(rig, 1, 2, 3, 4)
    offsets = rig.group.partitions[0]
    rig.ack(3)
    for event in offsets.decide_replay_dead(i64([1]), NOW, NOW):
        rig.record(0, event)
    dead_row_again = rig.take(page(4), now=NOW + 200)
    assert dead_row_again == [(1, 1)]
    rig.nack(1, now=NOW + 200)
    rig.take(page(4), now=NOW + 300)
    rig.nack(1, now=NOW + 300)
    rig.record(0, offsets.decide_delete_dead(i64([1]), NOW))
    rig.record(0, offsets.decide_reset(0, 0, NOW))
    for p, deleted in rig.groups.decide_delete("g", NOW):
        rig.record(p, deleted)
    events = [event for _, event in rig.log if KIND_NAMES[type(event)] == kind]
    assert events
    for event in events:
        (again,) = decode_events(b"\x91" + encode_event(event), "test")
        assert encode_event(again) == encode_event(event)
        assert again.rows() >= 1
        assert type(again) is type(event)
