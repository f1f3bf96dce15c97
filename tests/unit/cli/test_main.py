"""The `heapline` command finds its subcommands, tells about them, and shows errors to people."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import heapline.cli
from heapline.cli import main

runner = CliRunner()

SINGLE = '''
def single(count: int = 1) -> None:
    """Count to something."""
    print("counted", count)
'''
GROUP = """
import typer
from heapline.errors import TopicNotFound
app = typer.Typer(help="Several things.")

@app.command()
def first() -> None:
    print("first done")

@app.command()
def fails() -> None:
    raise TopicNotFound("jobs")
"""


@pytest.fixture
def subcommands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "single.py").write_text(SINGLE)
    (tmp_path / "several.py").write_text(GROUP)
    monkeypatch.setattr(heapline.cli, "__path__", [*heapline.cli.__path__, str(tmp_path)])
    monkeypatch.setattr(main, "SUBCOMMANDS", ("single", "several", "absent"))
    for name in ("single", "several"):
        monkeypatch.delitem(sys.modules, f"heapline.cli.{name}", raising=False)


def test_version_is_that_of_the_distribution() -> None:
    result = runner.invoke(main.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"heapline {version('heapline')}\n")


@pytest.mark.usefixtures("subcommands")
def test_help_lists_the_subcommands_that_are_there() -> None:
    shown = runner.invoke(main.app, ["--help"]).stdout
    assert "Count to something." in shown
    assert "Several things." in shown
    assert "absent" not in shown


@pytest.mark.usefixtures("subcommands")
def test_function_of_a_module_is_a_command() -> None:
    assert runner.invoke(main.app, ["single", "--count", "3"]).stdout == "counted 3\n"


@pytest.mark.usefixtures("subcommands")
def test_app_of_a_module_is_a_group_of_commands() -> None:
    assert runner.invoke(main.app, ["several", "first"]).stdout == "first done\n"


@pytest.mark.usefixtures("subcommands")
def test_unknown_command_is_refused_by_name() -> None:
    result = runner.invoke(main.app, ["absent"])
    assert result.exit_code == 2
    assert "absent" in result.stderr


@pytest.mark.usefixtures("subcommands")
def test_heapline_error_is_shown_without_a_traceback() -> None:
    result = runner.invoke(main.app, ["several", "fails"])
    assert result.exit_code == 1
    assert "TopicNotFound: there is no topic 'jobs'" in result.stderr
    assert "Traceback" not in result.stderr


def test_every_subcommand_teaches_itself() -> None:
    for name in main.Subcommands(name="heapline").list_commands(None):
        result = runner.invoke(main.app, [name, "--help"])
        assert result.exit_code == 0, result.output
        shown = result.stdout.count(f"heapline {name}")
        assert shown >= 2, f"heapline {name} --help shows its usage but no example"


def test_python_m_heapline_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "heapline", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: heapline" in result.stdout


def test_closed_streams_are_no_error() -> None:
    """As in cron jobs and under supervisors that close what they do not read."""
    command = f"'{sys.executable}' -m heapline demo --help <&- >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_closed_input_is_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    main._prepare_streams()
    with sys.stdin, sys.stdout, sys.stderr:
        print("goes nowhere")
        assert sys.stdin.read() == ""


def test_help_is_shown_where_there_is_no_utf8() -> None:
    shown = CliRunner(charset="ascii").invoke(main.app, ["put", "--help"])
    assert shown.exit_code == 0
    assert "--priority" in shown.stdout
