"""The benchmark harness drops nothing silently, keeps modules apart, and detects a regression."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import harness, ratios, report
from benchmarks.harness import Row

ROOT = Path(__file__).parents[3]

GOOD = """
import numpy as np
def run(quick, directory):
    print("chatter on standard output")
    (directory / "file").write_text("x")
    yield dict(name="pops", value=np.float64(12.5), unit="/s", baseline=5, ratio=2.5, target="≥ 2×", met=np.bool_(True))
    yield dict(name="bytes", value=39 if quick else 41, unit="B", baseline=None, ratio=None, target="≤ 40", met=quick)
"""
FAILS_LATE = """
def run(quick):
    yield dict(name="early", value=1, unit="s", baseline=None, ratio=None, target=None, met=None)
    raise RuntimeError("broken benchmark")
"""
HANGS = """
import threading
def run(quick):
    yield dict(name="early", value=1, unit="s", baseline=None, ratio=None, target=None, met=None)
    threading.Event().wait()
"""
INCOMPLETE = """
def run(quick):
    yield dict(name="half", value=1)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in {"good": GOOD, "late": FAILS_LATE, "hangs": HANGS, "incomplete": INCOMPLETE}.items():
        (tmp_path / f"made_{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return tmp_path


@pytest.mark.usefixtures("modules")
def test_rows_are_plain_numbers() -> None:
    pops, size = harness.run_module("made_good", quick=True)
    assert (pops.value, pops.ratio, pops.met, pops.better) == (12.5, 2.5, True, "higher")
    assert (size.value, size.met, size.better) == (39, True, "higher")


def test_scratch_directory_is_on_this_disk_and_removed_afterwards(modules: Path) -> None:
    rows = harness.run_module("made_good", quick=False)
    next(rows)
    assert len(list((modules / ".bench").glob("made_good-*/file"))) == 1
    assert len(list(rows)) == 1
    assert not (modules / ".bench").exists()


@pytest.mark.usefixtures("modules")
def test_failing_module_keeps_its_rows_and_is_reported() -> None:
    early, failure = harness.run_module("made_late", quick=True)
    assert (early.name, early.error) == ("early", None)
    assert (failure.met, failure.error) == (None, "module made_late ended with exit code 1")


@pytest.mark.usefixtures("modules")
def test_hanging_module_is_killed_and_reported() -> None:
    *_, failure = harness.run_module("made_hangs", quick=True, timeout_s=0.5)
    assert failure.error == "module made_hangs took longer than 0.5 s"


@pytest.mark.usefixtures("modules")
def test_row_without_all_its_keys_is_an_error() -> None:
    (failure,) = harness.run_module("made_incomplete", quick=True)
    assert failure.error


def test_missing_module_is_reported() -> None:
    (failure,) = harness.run_module("benchmarks.no_such", quick=True)
    assert (failure.name, failure.met) == ("benchmarks.no_such", None)
    assert "does not exist" in (failure.error or "")


def row(name: str = "pops", **fields: object) -> Row:
    return Row.from_yielded(
        {"name": name, "value": 1.0, "unit": "s", "baseline": 2.0, "ratio": 2.0, "target": "≥ 2×", "met": True} | fields
    )


def test_json_line_has_exactly_the_promised_keys() -> None:
    assert list(json.loads(report.json_line(row()))) == ["name", "value", "unit", "baseline", "ratio", "target", "met"]


@pytest.mark.parametrize(
    ("target", "ratio", "regressed"),
    [
        ("≥ 2×", 6.9, True),
        ("≥ 2×", 7.1, False),
        ("≤ 2×", 14.4, True),
        ("≤ 2×", 14.1, False),
        ("≤ 2×", 1.0, False),
        ("<= 2x", 15, True),
        ("<= 3 us", 6.9, True),
    ],
)
def test_ratio_worse_by_more_than_30_percent_is_a_regression(target: str, ratio: float, regressed: bool) -> None:
    assert ratios.regressed_from(row(target=target, ratio=ratio), {"pops": 10.0}) == (10.0 if regressed else None)


def test_saved_ratios_are_kept_by_suite_and_row(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    ratios.save("core", [row("a", ratio=1.23456), row("b", ratio=None)], path)
    ratios.save("core", [row("c", ratio=3)], path)
    ratios.save("core-quick", [row("a", ratio=9)], path)
    assert ratios.load("core", path) == {"a": 1.235, "c": 3}
    assert ratios.load("core-quick", path) == {"a": 9}
    assert ratios.load("other", path) == {}


def test_markdown_names_the_machine_without_its_name_and_marks_regressions() -> None:
    text = report.markdown([row(ratio=1.0)], {"pops": 10.0}, "core")
    assert "regression (was 10×)" in text
    assert "cores" in text
    assert platform.node() not in text


def test_percentiles_and_rates_with_a_cpu_row_are_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    names = ("enqueue", "enqueue: CPU of the server", "enqueue, p95", "enqueue, 2 callers")
    percentiles = ("due, p99: 5,000/s", "ack p50 while timers fire", "one pop, p50, next to a raw fsync")
    ratios.save("server", [row(name, ratio=1.0) for name in names + percentiles], path)
    assert set(ratios.load("server", path)) == {"enqueue: CPU of the server", "enqueue, 2 callers"}


def test_check_turns_a_regression_into_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "run_module", lambda module, quick, **_: iter([row(module, ratio=1.0)]))
    monkeypatch.setattr(ratios, "load", lambda key: {"benchmarks.heap": 10.0})
    for arguments, code in ((["core", "--json"], 0), (["core", "--json", "--check"], 1)):
        monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
        assert command.main() == code
        printed = capsys.readouterr()
        assert len(printed.out.splitlines()) == len(harness.SUITES["core"])
        assert "regression: benchmarks.heap" in printed.err


def test_check_fails_for_rows_whose_ratio_was_never_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("kept", "new", "rate", "rate: CPU of the server", "rate, p95")
    rows = [row(name, ratio=1.0) for name in names] + [row("bare", ratio=None)]
    monkeypatch.setattr(harness, "SUITES", {"core": ("benchmarks.heap",)})
    monkeypatch.setattr(harness, "run_module", lambda module, quick, **_: iter(rows))
    monkeypatch.setattr(ratios, "load", lambda key: {"kept": 1.0})
    monkeypatch.setattr("sys.argv", ["benchmarks", "core", "--json", "--check"])
    assert command.main() == 1
    named = [line for line in capsys.readouterr().err.splitlines() if line.startswith("not checked: ")]
    assert [line.removeprefix("not checked: no ratio of ").partition(" is saved")[0] for line in named] == [
        "new", "rate: CPU of the server",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ([], 1, ["gone", "enqueue, next to redis: CPU", "without"]),
        (["--peers", "postgres"], 1, ["gone", "without"]),
        (["--only", "lifecycle"], 0, []),
    ],
)
def test_check_fails_for_kept_rows_that_a_suite_no_longer_has(
    arguments: list[str],
    code: int,
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row("stays", ratio=1.0), row("without", ratio=None)]
    monkeypatch.setattr(harness, "SUITES", {"server": ("benchmarks.server.lifecycle",)})
    monkeypatch.setattr(harness, "run_module", lambda module, quick, **_: iter(rows))
    monkeypatch.setattr(
        ratios, "load", lambda key: dict.fromkeys(("stays", "gone", "enqueue, next to redis: CPU", "without"), 1.0)
    )
    monkeypatch.setattr("sys.argv", ["benchmarks", "server", "--json", "--check", *arguments])
    assert command.main() == code
    reasons = [line for line in capsys.readouterr().err.splitlines() if line.startswith("not checked: ")]
    assert [line.removeprefix("not checked: this run has no ratio of ") for line in reasons] == named


def test_saving_a_whole_suite_forgets_rows_that_it_no_longer_has(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    ratios.save("core", [row("a", ratio=1), row("b", ratio=2)], path)
    ratios.save("core", [row("b", ratio=3)], path, is_whole=True)
    assert ratios.load("core", path) == {"b": 3}


def test_check_fails_if_no_ratios_are_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ratios, "load", lambda key: {})
    monkeypatch.setattr("sys.argv", ["benchmarks", "streams", "--quick", "--check"])
    assert command.main() == 1
    assert "no ratios of streams-quick are saved" in capsys.readouterr().err


@pytest.mark.parametrize("suite", harness.SUITES)
def test_quick_ratios_of_every_suite_are_saved(suite: str) -> None:
    assert ratios.load(ratios.key_of(suite, quick=True))


def test_only_an_existing_module_can_be_chosen() -> None:
    assert command.parse(["core", "--only", "heap"]).only == ["heap"]
    with pytest.raises(SystemExit):
        command.parse(["core", "--only", "nothing"])
