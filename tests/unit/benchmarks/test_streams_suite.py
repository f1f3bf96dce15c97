"""The benchmark of streams: every specified figure is measured, on small sizes; its arithmetic."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import harness
from benchmarks.streams import publishing, timers
from benchmarks.streams.holes import HoledDisk, holed_journal
from heapline.journal import LogReader, RealDisk, scan

ROOT = Path(__file__).parents[3]
EXPECTED = {
    "benchmarks.streams.publishing": ["publish 5,000"],
    "benchmarks.streams.groups": ["batches=True", "as messages", "ten groups"],
    "benchmarks.streams.remote": ["over native, batches=True", "over native, as messages"],
    "benchmarks.streams.timers": ["publish 20,000 scheduled", "from snapshot", "journal alone", "due to fired, p99"],
    "benchmarks.streams.seeking": ["by journal time", "by wall time"],
}


@pytest.mark.parametrize("module", harness.SUITES["streams"])
def test_small_sizes_measure_every_figure(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    rows = list(harness.run_module(module, quick=True, scale=0.005, timeout_s=60))
    assert [row.error for row in rows if row.error] == []
    assert all(row.value is not None and row.value > 0 for row in rows)
    for expected in EXPECTED[module]:
        assert any(expected in row.name for row in rows), expected
    assert not list(tmp_path.iterdir())


def test_scaled_runs_do_not_save_ratios() -> None:
    assert command.parse(["streams", "--scale", "0.1"]).scale == 0.1
    for wrong in (["--scale", "0"], ["--scale", "2"], ["--scale", "0.5", "--save"]):
        with pytest.raises(SystemExit):
            command.parse(["streams", *wrong])


def test_sizes_are_whole_batches() -> None:
    assert publishing.sized(1_000_000, quick=False, scale=1) == 1_000_000
    assert publishing.sized(1_000_000, quick=True, scale=0.123) == 12_000
    assert publishing.sized(1_000_000, quick=True, scale=0.001) == 5000


def test_delays_are_counted_from_the_due_time_to_the_unit_that_fired_and_to_delivery() -> None:
    # Numbers 0 to 9 become due 0.2 ms apart from 1000 on; the first five fired at 1050, the others at 1100.
    fired = {100: (1050, 5), 200: (1100, 5)}
    seen = [
        timers.Seen(np.array([100, 101, 102, 103, 104, 150]), np.array([0, 1, 2, 3, 4, -1]), 1060),
        timers.Seen(np.arange(200, 205), np.arange(5, 10), 1170),
    ]
    to_fired, to_delivered = timers.delays(seen, fired, 1000, 10 / timers.DUE_PER_S)
    assert to_fired.round(1).tolist() == [50, 49.8, 49.6, 49.4, 49.2, 99, 98.8, 98.6, 98.4, 98.2]
    assert to_delivered.round(1).tolist()[4:6] == [59.2, 169]
    with pytest.raises(AssertionError, match="delivered"):
        timers.delays(seen[:1], fired, 1000, 10 / timers.DUE_PER_S)


def test_journal_with_holes_is_sound_and_takes_little_disk(tmp_path: Path) -> None:
    path = str(tmp_path / "j")
    units = holed_journal(
        path, 6 << 20, unit_bytes=128 << 10, rows=4, segment_bytes=2 << 20, start_ms=1000, step_ms=10, quiet_every=10
    )
    assert units == len(list(scan(RealDisk(), path))) == 48
    assert all(not any(unit.payloads(unit.blocks[0])) for unit in scan(HoledDisk(), path))
    used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "j").iterdir() if file.is_file())
    assert used < (6 << 20) / 4
    reader = LogReader(RealDisk(), path)
    assert (reader.offset_at(0, time=1200), reader.offset_at(1, wall=1200)) == (80, 2)
