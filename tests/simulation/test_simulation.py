"""The simulator over fixed seeds, and over new ones (soak); its runs repeat, and it detects broken brokers."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from heapline.core.groups.acked_ranges import DoneRanges
from heapline.core.groups.stream import StreamTail
from heapline.core.partition import Decision, Partition
from heapline.core.prepared import Prepared
from heapline.engine.duplicates import FormerPlaces
from heapline.engine.turns import Turns
from heapline.journal.writer import SegmentWriter
from heapline.server.settings import GATHER_STEPS
from tests.simulation.fake_disk import FakeFile
from tests.simulation.simulate import Simulation, main, simulate

SOAK_SECONDS = float(os.environ.get("HEAPLINE_SOAK_SECONDS", "600"))


SEEDS = range(1, 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_promises_hold_over_crashes_and_faults(seed: int) -> None:
    report = simulate(seed)
    assert report.complaints == [], report.text()
    assert report.history.drained | report.history.damaged == set(report.history.topics)


def test_seeds_cover_the_turns_of_a_server_and_of_an_embedded_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {seed: Simulation(seed).config.gather_steps for seed in SEEDS}
    assert set(steps.values()) == {0, GATHER_STEPS}
    gathered: list[bool] = []
    gathers = Turns._gathers
    monkeypatch.setattr(Turns, "_gathers", lambda self: gathered.append(True) or gathers(self))
    for wanted in (0, GATHER_STEPS):
        gathered.clear()
        simulate(next(seed for seed in SEEDS if steps[seed] == wanted), 20)
        assert bool(gathered) is bool(wanted)


@pytest.mark.parametrize("seed", [2, 3, 6, 7])
def test_groups_keep_their_promises_across_crashes_and_faults(seed: int) -> None:
    report = simulate(seed, groups=True)
    assert report.complaints == [], report.text()
    read = sum(len(call.result) for call in report.history.calls if call.verb == "group_fetch" and call.result)
    assert read > 200


@pytest.mark.parametrize("seed", [101])
def test_promises_hold_while_sectors_decay(seed: int) -> None:
    report = simulate(seed, rot=True)
    assert report.complaints == [], report.text()


def test_the_same_seed_is_the_same_run() -> None:
    first, second = simulate(7, 100), simulate(7, 100)
    assert first.history.lines() == second.history.lines()
    assert first.digest != simulate(8, 100).digest


def test_report_names_the_options_that_replay_its_run() -> None:
    report = simulate(7, 20, groups=True)
    assert report.text().endswith("simulate --seed 7 --steps 20 --groups")


def test_run_can_be_repeated_in_another_process() -> None:
    command = [sys.executable, "-m", "tests.simulation.simulate", "--seed", "7", "--steps", "100"]
    answers = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": h}, capture_output=True, check=True).stdout
        for h in ("1", "2")
    }
    assert len(answers) == 1
    assert simulate(7, 100).digest.encode() in answers.pop()


# --- broken brokers: a simulator that finds nothing wrong with them would be worthless --------------------------------


def complaints_of_some_seed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the promises that are broken, over a few seeds; also the type of an error that ended a run."""
    found: set[str] = set()
    for seed in range(1, 9):
        found |= {text.partition(" ")[0] for text in simulate(seed, 150, rot=False).complaints}
        if found:
            break
    return found


def test_simulator_detects_a_broker_that_does_not_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: FakeFile) -> None:
        if not self.path.endswith(".seg"):
            self._inode.sync()

    monkeypatch.setattr(FakeFile, "fdatasync", forgetful)
    assert complaints_of_some_seed(monkeypatch)


def test_simulator_detects_retries_treated_as_new_after_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FormerPlaces, "parts", lambda self: self._today)
    found = (text for seed in (12, *range(2, 9)) for text in simulate(seed, rot=False).complaints)
    assert any(text.startswith("NoDoubleEnqueue") for text in found)


def test_simulator_detects_answers_before_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = SegmentWriter._write

    def early(self: SegmentWriter, unit: object) -> None:
        file = self._active.file  # type: ignore[union-attr]
        sync, file.fdatasync = file.fdatasync, lambda: None  # type: ignore[method-assign]
        try:
            commit(self, unit)  # type: ignore[arg-type]
        finally:
            file.fdatasync = sync  # type: ignore[method-assign]

    monkeypatch.setattr(SegmentWriter, "_write", early)
    assert complaints_of_some_seed(monkeypatch)


def test_simulator_detects_an_acknowledged_ack_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Partition, "decide_ack", lambda self, ids, tokens: Decision([]))
    assert "AckedStaysGone" in complaints_of_some_seed(monkeypatch)


def test_simulator_detects_a_lease_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    tick = Partition.decide_tick

    def hasty(self: Partition, now: object, limit: int, seq: object) -> object:
        return tick(self, now._replace(steady=now.steady + 400), limit, seq)  # type: ignore[attr-defined, arg-type]

    monkeypatch.setattr(Partition, "decide_tick", hasty)
    assert {"SingleLease", "NeverEarly"} & complaints_of_some_seed(monkeypatch)


def test_simulator_detects_a_heap_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    eligible = Partition.eligible

    def upside_down(self: Partition, count: int) -> object:
        rows = eligible(self, max(count, 50))
        return type(rows)(*(column[::-1][:count].copy() for column in rows))

    monkeypatch.setattr(Partition, "eligible", upside_down)
    assert complaints_of_some_seed(monkeypatch)


def test_simulator_detects_a_commit_of_unnamed_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Prepared.decide_commit

    def generous(self: Prepared, batch_id: str, parts: object, *rest: object) -> object:
        return decide(self, batch_id, sorted(self.batches[batch_id]), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Prepared, "decide_commit", generous)
    assert "BatchAllOrNothing" in complaints_of_some_seed(monkeypatch)


def group_complaints_of_some_seed() -> set[str]:
    for seed in range(2, 8):
        found = {text.partition(" ")[0] for text in simulate(seed, 200, groups=True).complaints}
        if found:
            return found
    return set()


def test_simulator_detects_forgotten_out_of_order_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DoneRanges, "to_state", lambda self: [b"", b"", b""])
    monkeypatch.setattr(DoneRanges, "contains", lambda self, offsets: np.zeros(len(offsets), dtype=np.bool_))
    assert group_complaints_of_some_seed() & {"GroupAckedStaysDone", "Traceback"}


def test_simulator_detects_rows_withheld_from_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    append = StreamTail.append
    monkeypatch.setattr(StreamTail, "append", lambda self, rows: append(self, rows.only(rows.ids % 5 != 0)))
    assert "GroupSeesAll" in group_complaints_of_some_seed()


@pytest.mark.soak
@pytest.mark.parametrize("more", [[], ["--groups"]])
def test_promises_hold_over_many_new_seeds(more: list[str]) -> None:
    first = int.from_bytes(os.urandom(3), "little") + 1_000_000
    assert main(["--seed", str(first), "--soak", str(SOAK_SECONDS / 2), *more]) == 0
