"""The frames of `heapline top` at 80×24 and other sizes, and its keys."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from heapline.cli.output import json_line
from heapline.cli.top import is_drawable, watch_json
from heapline.cli.top.keyboard import Screen, keys_in
from heapline.cli.top.sampler import Sample, Watch
from heapline.cli.top.view import detail_frame, list_frame, plain_lines, translated
from heapline.contract.message import PartitionStats
from tests.unit.cli.top.rig import busy, commits, stats

SERVER = "queue.example:7400"


def screen(**given: Any) -> Screen:
    return Screen(SERVER, 1.0, **given)


def watch() -> Watch:
    watch = Watch()
    watch.add(Sample(0.0, {"mail": busy("mail"), "jobs": stats(), "sick": stats()}))
    watch.add(Sample(1.0, {
        "mail": busy("mail", enqueued_total=1500, acked_total=20, nacked_total=4, latencies=commits(200)),
        "jobs": stats(paused=True), "sick": "reloading",
    }))  # fmt: skip
    return watch


def shown(lines: list[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def listed(of: Watch, on: Screen, width: int = 80, height: int = 24) -> list[str]:
    return shown(list_frame(of, on, width, height, "12:00:00", 100.0))


def detailed(of: Watch, on: Screen, width: int = 80, height: int = 24) -> list[str]:
    return shown(detail_frame(of, on, width, height, "12:00:00", 100.0))


def row_of(lines: list[str], name: str) -> list[str]:
    return next(line for line in lines if line.startswith(name)).split()


def test_list_at_80_by_24_shows_every_promised_column() -> None:
    lines = listed(watch(), screen())
    assert SERVER in lines[0]
    assert "3 topics" in lines[0]
    assert "ready 1 234 567   delayed 4 321   leased 256   dead 3" in lines[1]
    head = next(line for line in lines if line.startswith("TOPIC"))
    assert head.split() == ["TOPIC", "READY▼", "DELAY", "LEASED", "DEAD", "IN/S", "IN", "OUT/S", "OLDEST", "DUE10S"]
    assert row_of(lines, "mail") == ["mail", "1.23M", "4321", "256", "3", "1500", "█", "20", "1m15", "7"]
    assert "q quit" in lines[-1]


def test_paused_and_troubled_topics_say_so_in_their_rows() -> None:
    lines = listed(watch(), screen())
    assert row_of(lines, "jobs")[1] == "❚❚"
    assert row_of(lines, "sick") == ["sick", "reloading"]


def test_wide_terminal_has_room_for_more_columns() -> None:
    lines = listed(watch(), screen(), 200, 50)
    head = next(line for line in lines if line.startswith("TOPIC"))
    for name in ("OUT/S", "FAIL/S", "DUE 1M", "LEASE", "COMMIT99", "BACKLOG", "DISK"):
        assert name in head
    assert {"4", "15", "4.2s", "9.9", "█"} <= set(row_of(lines, "mail"))


@settings(max_examples=60)
@given(
    width=st.integers(1, 250), height=st.integers(1, 60), topics=st.integers(0, 40), in_detail=st.booleans(),
    lost=st.sampled_from(["", "connection lost"]), is_typing=st.booleans(),
)  # fmt: skip
def test_every_frame_is_exactly_as_large_as_the_terminal(
    width: int, height: int, topics: int, in_detail: bool, lost: str, is_typing: bool
) -> None:
    of = Watch()
    for at in (0.0, 1.0):
        of.add(Sample(at, {f"topic-{n}-{'x' * n}": busy("t", enqueued_total=int(at) * n) for n in range(topics)}))
    on = screen(topic="topic-0-" if in_detail else None, lost=lost, is_typing=is_typing, only="t" * is_typing)
    frame = (detail_frame if in_detail else list_frame)(of, on, width, height, "12:00:00", 100.0)
    assert len(frame) == height
    assert all(line.cell_len <= width for line in frame)


def test_lost_connection_is_shown_and_the_numbers_stay() -> None:
    lines = listed(watch(), screen(lost="connection lost", lost_at=88.0))
    assert "connection lost 12s ago, retrying" in lines[0]
    assert row_of(lines, "mail")[1] == "1.23M"


def test_list_without_topics_says_how_to_create_one() -> None:
    assert any("heapline topic create" in line for line in listed(Watch(), screen()))


def test_filter_that_matches_nothing_is_named() -> None:
    assert any("no topic name contains 'zzz'" in line for line in listed(watch(), screen(only="zzz")))


def test_more_topics_than_lines_are_counted_and_the_chosen_one_is_on_the_screen() -> None:
    of = Watch()
    of.add(Sample(0.0, {f"t{n:02d}": stats(ready=n) for n in range(60)}))
    lines = listed(of, screen(sort="name", chosen="t55"))
    assert any(line.startswith("t55") for line in lines)
    assert "more" in lines[-1]


def test_detail_at_80_by_24_shows_waits_latencies_bars_and_partitions() -> None:
    lines = detailed(watch(), screen(topic="mail"))
    text = "\n".join(lines)
    for words in ("oldest ready 1m15", "first lease ends in 4.2s", "due in 10 s 7", "in 1 min 15", "nacked/s 4",
                  "throttled: a bad disk",
                  "commit 5.5 ms · p99 9.9 ms", "in 10 s     4", "0…9     1", "in 1500/s", "out 20/s"):  # fmt: skip
        assert words in text, text
    assert row_of(lines, "    0")[:5] == ["0", "11", "2", "3", "1"]


def test_partitions_of_a_topic_scroll() -> None:
    of = Watch()
    of.add(Sample(0.0, {"jobs": stats("jobs", 64)}))
    on = screen(topic="jobs")
    assert "1000" in row_of(detailed(of, on), "    0")
    on.press("end", [])
    lines = detailed(of, on)
    assert "1063" in row_of(lines, "   63")
    assert on.scroll < 64


def test_detail_of_a_deleted_topic_says_so() -> None:
    assert any("topic 'other' no longer exists" in line for line in detailed(watch(), screen(topic="other")))


def test_once_shows_every_topic_and_every_partition() -> None:
    of = Watch()
    of.add(Sample(0.0, {f"t{n:02d}": stats(f"t{n:02d}", 100) for n in range(60)}))
    assert sum(line.startswith("t") for line in shown(plain_lines(of, screen(), 160))) == 60
    assert any(line.startswith("   99") for line in shown(plain_lines(of, screen(topic="t01"), 160)))


@pytest.mark.parametrize(("term", "live"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_dumb_terminal_gets_one_sample_instead_of_a_live_view(term: str, live: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})
    assert is_drawable(console) is live
    assert not is_drawable(Console(file=io.StringIO(), force_terminal=False, _environ={"TERM": term}))


def test_ascii_terminal_gets_only_ascii() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    frames = [list_frame(watch(), screen(), 80, 24, "12:00:00", 1.0), plain_lines(watch(), screen(topic="mail"), 80),
              detail_frame(watch(), screen(topic="mail", lost="lost"), 80, 24, "12:00:00", 1.0)]  # fmt: skip
    for frame in frames:
        widths = [line.cell_len for line in frame]
        drawn = translated(frame, console)
        assert all(line.plain.isascii() for line in drawn)
        assert [line.cell_len for line in drawn] == widths


def test_json_has_rates_waits_and_percentiles() -> None:
    of = watch()
    printed = json.loads(json_line(watch_json(of, of.rows(), SERVER, in_full=True)))
    mail = next(topic for topic in printed["topics"] if topic["topic"] == "mail")
    assert (mail["rates"]["enqueued"], mail["due_10s"], mail["due_60s"], mail["lease_ends_in"]) == (1500, 7, 15, 4.2)
    assert mail["partitions"][1]["throttled"] == "a bad disk"
    assert {"topic": "sick", "trouble": "reloading"} in printed["topics"]
    assert printed["totals"]["ready"] == 1_234_567
    assert set(PartitionStats.__struct_fields__) < set(mail["partitions"][0])


def test_topic_of_a_broker_without_a_log_shows_no_disk() -> None:
    of = Watch()
    of.add(Sample(0.0, {"jobs": stats(log=None, spine=None)}))
    assert "disk" not in "\n".join(listed(of, screen(), 200) + detailed(of, screen(topic="jobs"), 200))
    printed = json.loads(json_line(watch_json(of, of.rows(), SERVER)))
    assert (printed["topics"][0]["journal_bytes"], printed["totals"]["journal_bytes"]) == (None, None)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_have_names_and_unknown_ones_are_skipped() -> None:
    assert list(keys_in("q\x1b[A\x1bOB\r\x7f\x1b[5~")) == ["q", "up", "down", "enter", "backspace", "page up"]
    assert list(keys_in("\x1b[1;5Cs\x1b")) == ["s", "escape"]


def pressed(on: Screen, *keys: str, names: tuple[str, ...] = ("a", "b", "c")) -> Screen:
    for key in keys:
        on.press(key, names)
    return on


def test_s_cycles_through_all_sort_orders() -> None:
    on = screen()
    seen = [pressed(on, "s").sort for _ in range(9)]
    assert len(set(seen)) == 9
    assert seen[-1] == "ready"
    assert pressed(on, "S").sort == "name"


def test_arrows_choose_a_topic_enter_opens_it_and_escape_closes_it() -> None:
    on = pressed(screen(), "down", "down", "enter")
    assert on.topic == "b"
    assert pressed(on, "escape").topic is None
    assert on.chosen == "b"
    assert pressed(on, "end", "down").chosen == "c"
    assert pressed(on, "home", "up").chosen == "a"


def test_enter_without_a_choice_opens_the_first_topic() -> None:
    assert pressed(screen(), "enter").topic == "a"
    assert pressed(screen(), "enter", names=()).topic is None


def test_slash_types_a_filter_in_which_other_keys_mean_nothing() -> None:
    on = pressed(screen(), "/", "q", "s", "x", "backspace")
    assert (on.only, on.wants_end, on.is_typing) == ("qs", False, True)
    assert pressed(on, "enter", "q").wants_end
    assert pressed(screen(only="x"), "/", "escape").only == ""


@pytest.mark.parametrize("topic", [None, "a"])
def test_p_pauses_and_q_ends_in_both_views(topic: str | None) -> None:
    on = pressed(screen(topic=topic), "p")
    assert on.is_held
    assert not pressed(on, " ").is_held
    assert pressed(on, "q").wants_end
