"""`heapline assign watch`: the views of workers, with and without a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal

import pytest
from rich.console import Console
from typer.testing import CliRunner

from heapline.assign.overview import Move, Overview, Sample, WorkerView
from heapline.cli import assign as assign_cli
from heapline.cli.assign import JsonLines, LiveScreen, PlainLines, Screen
from heapline.cli.main import app


def crowd(workers: int) -> Overview:
    """Return workers that hold ten partitions each."""
    seats = [
        WorkerView(f"worker-{n}", "live", n == 1, 100 + n, 7, 10, 10, [f"tool{n}.chamber{c}" for c in range(10)])
        for n in range(workers)
    ]
    holders = {id: (seat.worker, 3) for seat in seats for id in seat.partitions}
    return Overview(7, 2, "stable", "worker-1", 10 * workers, [], seats, holders)


def printed(screen: Screen, width: int = 80, height: int = 24, terminal: bool = True) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None, legacy_windows=False
    )
    console.print(screen)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("workers", [0, 1, 3, 20, 200])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 60)])
def test_screen_fits_the_terminal(workers: int, width: int, height: int) -> None:
    moved = [Move(f"tool{n}.chamber0", "worker-0", "worker-1", 9) for n in range(50)]
    lines = printed(Screen("heapline-assign", crowd(workers), moved), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_screen_shows_leader_partitions_and_moves() -> None:
    seen = crowd(3)
    seen.workers[2].leaving, seen.workers[0].coming, seen.unheld = ["a.b"], ["a.b", "c.d"], ["c.d"]
    text = "\n".join(printed(Screen("meeting", seen, [Move("a.b", "worker-2", "worker-0", 9)], {"worker-0": 7.2})))
    for expected in ("meeting", "version 7 stable", "led by worker-1 (epoch 2)", "3 workers, 30 partitions",
                     "1 without a worker", "* worker-1", "silent 7 s", "+2", "-1",
                     "a.b: worker-2 → worker-0, fence 9"):  # fmt: skip
        assert expected in text


def test_screen_of_many_workers_counts_hidden_ones() -> None:
    assert any("and 186 more" in line for line in printed(Screen("b", crowd(200))))


def test_without_a_terminal_every_worker_is_printed() -> None:
    assert sum("worker-" in line for line in printed(Screen("b", crowd(100)), 160, 24, terminal=False)) >= 100


def test_live_screen_keeps_the_last_sample_when_the_store_does_not_answer() -> None:
    now = 0.0
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    assert isinstance(console.file, io.StringIO)
    with LiveScreen(console, "meeting", lambda: now) as live:
        live.show(Sample(crowd(2), []))
        now = 5.0
        live.show(Sample(None, [], "no answer"))
    text = console.file.getvalue()
    assert "no answer" in text
    assert "silent 5 s" in text


def test_plain_lines_show_the_state_once_and_then_moves() -> None:
    console = Console(file=io.StringIO(), width=160)
    assert isinstance(console.file, io.StringIO)
    with PlainLines(console, "meeting") as lines:
        lines.show(Sample(crowd(2), []))
        lines.show(Sample(crowd(2), [Move("a", "", "worker-0", 9)]))
        lines.show(Sample(None, [], "no answer"))
        lines.show(Sample(None, [], "no answer"))
    text = console.file.getvalue()
    assert text.count("meeting") == 1
    assert text.count("no answer") == 1
    assert text.splitlines()[-2:] == ["a: none → worker-0, fence 9", "no answer"]


def test_json_is_a_line_for_each_change_and_none_for_heartbeats(capsys: pytest.CaptureFixture[str]) -> None:
    lines, later = JsonLines(), crowd(2)
    later.workers[0].revision += 1
    lines.show(Sample(crowd(2), []))
    lines.show(Sample(later, []))
    lines.show(Sample(crowd(3), [Move("a", "worker-0", "worker-2", 9)]))
    lines.show(Sample(None, [], "no answer"))
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (first["leader"], len(first["workers"]), first["moves"]) == ("worker-1", 2, [])
    assert first["holders"]["tool0.chamber0"] == {"worker": "worker-0", "fence": 3}
    assert second["moves"] == [{"partition": "a", "from": "worker-0", "to": "worker-2", "fence": 9}]
    assert err == "no answer\n"


def test_unreachable_nats_server_is_reported_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heapline.cli.assign.CONNECT_WITHIN", 0.2)
    result = CliRunner().invoke(app, ["assign", "watch", "--nats", "nats://u:secret@127.0.0.1:1", "--once"])
    assert result.exit_code == 1
    assert "no NATS server accepted the connection" in result.output
    assert "secret" not in result.output


def test_help_lists_options() -> None:
    result = CliRunner().invoke(app, ["assign", "watch", "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert "--bucket" in result.output


def test_ctrl_c_ends_watch_even_if_a_cancellation_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign_cli, "CANCEL_AGAIN", 0.01)
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    asyncio.run(assign_cli._until_stopped(stubborn()))
    assert swallowed == 3
