"""The server's benchmark: its arithmetic, its load and its tables; and one short run against a real server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import harness, report
from benchmarks.drivers import proc
from benchmarks.drivers.outstanding import Outstanding
from benchmarks.drivers.window import Job, Outcome, Window, run_loop
from benchmarks.peers import PEERS
from benchmarks.peers.install import run as run_command
from benchmarks.peers.peer import PeerMissing
from benchmarks.rows import Row
from benchmarks.server import bare_server as bare
from benchmarks.server import connections, driving, latency, lifecycle, next_to_peers, targets
from benchmarks.server.fsyncs import fsync_ms
from benchmarks.server.schedule import open_loop, percentile, poisson
from benchmarks.server.spawned import bare_server, heapline_server

ROOT = Path(__file__).parents[3]


def job(**changes: object) -> Job:
    return Job(**{"port": 1, "batch": 10, "in_flight": 4, "seconds": 60.0, "server_pid": os.getpid()} | changes)  # type: ignore[arg-type]


# -- arithmetic --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_percentile_is_the_smallest_sample_with_that_share_at_or_below(samples: list[float], percent: int) -> None:
    found = percentile(samples, percent)
    ordered = sorted(samples)
    assert found == ordered[-(-len(samples) * percent // 100) - 1]


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_schedule_is_deterministic_sorted_and_at_the_rate() -> None:
    due = poisson(500, 20)
    assert due == poisson(500, 20)
    assert due == sorted(due)
    assert due[0] >= 0
    assert due[-1] < 20
    assert 9_500 < len(due) < 10_500


def test_outcome_contains_rate_and_cpu_per_message() -> None:
    outcome = Outcome(messages=2000, seconds=4.0, client_cpu_s=0.01, server_cpu_s=0.02)
    assert (outcome.rate, outcome.client_us, outcome.server_us) == (500.0, 5.0, 10.0)


def test_typical_round_is_the_median() -> None:
    rounds = [Outcome(messages=n, seconds=1.0, client_cpu_s=0, server_cpu_s=0) for n in (300, 100, 200)]
    assert driving.typical(rounds).messages == 200


# -- load --------------------------------------------------------------------------------------------------------------


async def test_calls_of_an_open_loop_do_not_wait_for_one_another() -> None:
    """None ends before the last one has started."""
    started: list[int] = []
    last = asyncio.Event()

    async def call(number: int, due_at: float) -> None:
        started.append(number)
        if number == 4:
            last.set()
        await last.wait()

    async with asyncio.timeout(20):
        late = await open_loop([0.0, 0.001, 0.001, 0.002, 0.003], call)
    assert started == [0, 1, 2, 3, 4]
    assert len(late) == 5


async def test_window_counts_completed_concurrent_turns() -> None:
    turns = 0

    async def turn() -> int:
        nonlocal turns
        turns += 1
        await asyncio.sleep(0)
        return 10

    outcome = await Window(job(messages_max=200)).measure(turn)
    assert outcome.messages == turns * 10
    assert 200 <= outcome.messages < 200 + 4 * 10


async def test_failing_turn_fails_the_measurement() -> None:
    async def turn() -> int:
        raise RuntimeError("broken")

    with pytest.raises(ExceptionGroup):
        await Window(job()).measure(turn)


async def test_turn_of_a_worker_library_ends_after_as_many_messages() -> None:
    load = Outstanding(job(), lambda: asyncio.sleep(0))
    turn = asyncio.ensure_future(load.turn())
    for _ in range(9):
        load.worked_off()
        await asyncio.sleep(0)
    assert not turn.done()
    load.worked_off()
    assert await turn == 10


def test_cpu_and_memory_of_a_process_and_its_children_are_read() -> None:
    burn = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True); input()"
    before = proc.cpu_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in proc.descendants(os.getpid())
        assert proc.cpu_seconds(os.getpid()) - before >= 0.08  # the CPU clock has a resolution of 10 ms
        assert 1 << 20 < proc.anonymous_bytes(process.pid) < 1 << 30
        process.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        proc.anonymous_bytes(process.pid)


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "value", "holds", "written"),
    [
        (targets.Bound("≥", 60_000, "messages/s"), 60_000, True, "≥ 60,000 messages/s"),
        (targets.Bound("≥", 2.5, "×"), 2.4, False, "≥ 2.5×"),
        (targets.Bound("<", 50.0, "ms"), 50.0, False, "< 50 ms"),
        (targets.answer_bounds(0.25)[50], 0.85, True, "≤ bare + 0.6 ms = 0.85 ms"),
        (targets.answer_bounds(0.25)[99], 10.1, False, "≤ 10 ms"),
        (targets.delivery_bounds(0.25)[50], 3.75, True, "≤ 3 fsyncs + 3 ms = 3.75 ms"),
    ],
)
def test_target_shows_its_goal_and_whether_it_was_met(
    bound: targets.Bound, value: float, holds: bool, written: str
) -> None:
    assert (bound.holds(value), str(bound)) == (holds, written)


def test_every_peer_has_a_target_and_every_target_a_peer() -> None:
    assert PEERS.keys() == targets.PEERS.keys()


def test_results_of_a_peer_are_rows_with_a_ratio_and_its_durability() -> None:
    theirs = Outcome(messages=10, seconds=1.0, client_cpu_s=0.1, server_cpu_s=0.1)
    ours = Outcome(messages=40, seconds=1.0, client_cpu_s=0.1, server_cpu_s=0.1)
    about = {"peer": "postgres", "version": "1", "durability": "some"}
    rate, cpu = (Row.from_yielded(row) for row in next_to_peers.figures("postgres", about, theirs, ours))
    assert (rate.ratio, rate.target, rate.met, rate.about) == (4.0, "≥ 3.5×", True, about)
    assert (cpu.ratio, cpu.target, cpu.met, cpu.better) == (0.25, "≤ 0.2×", False, "lower")


def test_peer_without_a_target_is_only_reported() -> None:
    once = Outcome(messages=10, seconds=1.0, client_cpu_s=0.1, server_cpu_s=0.1)
    rate, cpu = (Row.from_yielded(row) for row in next_to_peers.figures("beanstalkd", {}, once, once))
    assert (rate.target, rate.met) == (None, None)
    assert (cpu.target, cpu.met) == ("≤ 0.05×", False)


def test_answers_and_deliveries_are_next_to_the_bare_server() -> None:
    cpu = {"answered": 0.002, "bare": 0.001, "grpc": 0.005, "delivered": 0.004}
    ms = [number / 1000 for number in range(1, 101)]
    half = [time / 2 for time in ms]
    seen = latency.Samples(fsyncs=[0.5] * 9, answered=ms, bare=half, grpc=ms, delivered=ms, late=ms, cpu=cpu)
    rows = {row.name: row for row in map(Row.from_yielded, latency.all_figures(seen))}
    median, worst = rows["500 enqueues/s: answered, p50"], rows["500 enqueues/s: answered, p99"]
    assert (median.value, median.baseline, median.ratio, median.met) == (50.0, 25.0, 2.0, False)
    assert (worst.value, worst.target, worst.met, worst.better) == (99.0, "≤ 10 ms", False, "lower")
    assert rows["500 enqueues/s, a consumer waiting: delivered, p95"].target == "< 50 ms"
    bare, grpc = (rows[f"500 enqueues/s: CPU of the server, next to {other}"] for other in ("bare frames", "gRPC"))
    assert (bare.ratio, bare.target, bare.met) == (2.0, "≤ 2.6×", True)
    assert (grpc.ratio, grpc.target, grpc.met) == (0.4, "≤ 0.45×", True)


def test_calls_on_many_connections_are_next_to_the_bare_server() -> None:
    ours, bare = (
        connections.Load(seconds=1.0, server_s=spent, client_s=spent, times=[0.001] * count)
        for spent, count in ((0.5, 4000), (0.1, 8000))
    )
    rows = {row.name: row for row in map(Row.from_yielded, connections.figures(ours, ours, bare))}
    what = "enqueue, 50 connections, one call in flight each"
    rate, p95, server = rows[what], rows[f"{what}, p95"], rows[f"{what}: CPU of the server"]
    assert (rate.ratio, rate.target, rate.met, rate.better) == (0.5, "≥ 5,000 calls/s", False, "higher")
    assert (p95.value, p95.target, p95.met, p95.better) == (1.0, "< 20 ms", True, "lower")
    assert (server.value, server.baseline, server.met) == (125.0, 12.5, False)
    assert rows["enqueue over HTTP and JSON, 64 connections"].target == "≥ 3,000 calls/s"


def test_fsync_probe_times_each_fsync_and_removes_its_file(tmp_path: Path) -> None:
    assert len(fsync_ms(tmp_path, count=3)) == 3
    assert list(tmp_path.iterdir()) == []


def test_missing_peer_is_in_both_tables_with_the_reason() -> None:
    row = Row.from_yielded(next_to_peers.missing("awa", {"peer": "awa", "durability": "some"}, "no wheel | here"))
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        report.print_table([row], {}, console)
        report.print_peers([row], console)
        shown = console.export_text()
    assert re.search(r"next to awa .* ≥ 5× .* missing", shown)
    assert "missing: no wheel | here" in shown
    assert "| awa | – | missing: no wheel \\| here |" in report.markdown([row], {}, "server")


def test_peer_whose_program_fails_is_missing_with_its_error() -> None:
    with pytest.raises(PeerMissing, match=r"cannot fetch: .*complaint"):
        run_command([sys.executable, "-c", "raise SystemExit('complaint')"], "cannot fetch")
    with pytest.raises(PeerMissing, match="cannot fetch"):
        run_command(["no-such-program"], "cannot fetch")


def test_peers_are_chosen_by_name() -> None:
    assert command.parse(["server"]).peers == tuple(PEERS)
    assert command.parse(["server", "--peers", "redis, awa"]).peers == ("redis", "awa")
    assert command.parse(["server", "--peers", ""]).peers == ()
    with pytest.raises(SystemExit):
        command.parse(["server", "--peers", "kafka"])


def test_steps_reach_the_progress_bar_and_add_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_steps.py").write_text(
        "from benchmarks.rows import Step\n"
        "def run(quick, peers):\n"
        "    yield Step('half', 1, 2)\n"
        "    yield dict(name=','.join(peers), value=1, unit='', baseline=None, ratio=None, target=None, met=None)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    steps: list[harness.Step] = []
    rows = list(harness.run_module("made_steps", quick=True, peers=("a", "b"), on_step=steps.append))
    assert [row.name for row in rows] == ["a,b"]
    assert steps == [harness.Step("half", 1, 2)]


# -- the whole path ----------------------------------------------------------------------------------------------------


def test_lifecycle_runs_against_a_real_server(tmp_path: Path) -> None:
    with heapline_server(tmp_path / "data") as server:
        outcome = driving.drive("ours", lifecycle.job_of(server, "lifecycle", (20, 2), 30.0, messages_max=200))
    assert 200 <= outcome.messages < 200 + 2 * 20
    assert min(outcome.rate, outcome.server_us, outcome.client_us) > 0


def test_bare_server_accepts_the_same_load(tmp_path: Path) -> None:
    with bare_server(tmp_path / "data") as server:
        outcome = driving.drive("bare", lifecycle.job_of(server, "lifecycle", (20, 2), 30.0, messages_max=200))
    assert 200 <= outcome.messages < 200 + 2 * 20


def test_lifecycle_results_are_next_to_the_floor() -> None:
    ours = Outcome(messages=60_000, seconds=1.0, client_cpu_s=0.6, server_cpu_s=1.2)
    floor = Outcome(messages=120_000, seconds=1.0, client_cpu_s=0.6, server_cpu_s=0.6)
    rate, server, client = (Row.from_yielded(r) for r in lifecycle.figures("lifecycle", (100, 16), ours, floor))
    assert (rate.ratio, rate.target, rate.met, rate.better) == (0.5, "≥ 100,000 messages/s", False, "higher")
    assert (round(server.ratio or 0, 3), server.target, server.met, server.better) == (4.0, "≤ 5.5 µs", False, "lower")
    assert (round(client.ratio or 0, 3), client.target, client.met, client.better) == (2.0, "≤ 3 µs", False, "lower")


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_bare_frames_are_read_wherever_they_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    sent = b"".join(bare.HEAD.pack(len(body), n, n + 7) + body for n, body in enumerate(bodies))
    cut = data.draw(st.integers(0, len(sent)))
    buffer, seen = bytearray(), []
    for piece in (sent[:cut], sent[cut:]):
        buffer += piece
        seen += bare.frames(buffer)
    assert seen == [(n, n + 7, body) for n, body in enumerate(bodies)]
    assert not buffer


def test_connections_run_against_a_real_server(tmp_path: Path) -> None:
    native, http = connections.Load(), connections.Load()
    with heapline_server(tmp_path / "data") as server:
        run_loop(connections.over_native(server, native, 0.1))
        run_loop(connections.over_http(server, http, 0.1))
        run_loop(connections.check(server, len(native.times) + len(http.times)))
        with pytest.raises(RuntimeError, match="calls were answered"):
            run_loop(connections.check(server, 0))
    assert min(len(native.times), len(http.times)) >= 50


def test_failed_driver_is_reported_with_its_last_error_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "  +-+---- 1 ----\n    | ValueError: broken\n    +------------\n"
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(driving.DriverFailed, match=r"failed: ValueError: broken$"):
        driving.drive("ours", job())
