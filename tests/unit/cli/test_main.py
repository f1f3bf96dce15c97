"""The `heapline` command: lazy subcommands, their help, shell completion, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heapline.cli
from heapline import accelerator
from heapline.cli import main
from heapline.cli.main import Lazy

runner = CliRunner()

SINGLE = '''
def single(count: int = 1) -> None:
    """Count to something."""
    print("counted", count)
'''
GROUP = """
import typer
from heapline.contract.errors import TopicNotFound
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
    table = {"single": Lazy("single", "Count to something.", "single"), "several": Lazy("several", "Several things.")}
    monkeypatch.setattr(main.Subcommands, "table", table)
    for name in ("single", "several"):
        monkeypatch.delitem(sys.modules, f"heapline.cli.{name}", raising=False)


def test_version_is_that_of_the_distribution_and_names_the_accelerator() -> None:
    result = runner.invoke(main.app, ["--version"])
    first, second = result.stdout.splitlines()
    assert (result.exit_code, first) == (0, f"heapline {version('heapline')}")
    assert second == f"accelerator: {accelerator.description()}"


@pytest.mark.usefixtures("subcommands")
def test_help_lists_subcommands_without_importing_them() -> None:
    shown = runner.invoke(main.app, ["--help"]).stdout
    assert "Count to something." in shown
    assert "Several things." in shown
    assert not {"heapline.cli.single", "heapline.cli.several"} & set(sys.modules)


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
    assert "Did you mean" not in result.stderr


@pytest.mark.usefixtures("subcommands")
def test_misspelled_command_is_refused_with_similar_ones() -> None:
    result = runner.invoke(main.app, ["singel"])
    assert result.exit_code == 2
    assert "No such command 'singel'. Did you mean 'single'?" in result.stderr


@pytest.mark.usefixtures("subcommands")
def test_heapline_error_is_shown_without_a_traceback() -> None:
    result = runner.invoke(main.app, ["several", "fails"])
    assert result.exit_code == 1
    assert "TopicNotFound: " in result.stderr
    assert "'jobs'" in result.stderr
    assert "Traceback" not in result.stderr


def every_command() -> Iterator[tuple[str, Any, str | None]]:
    """Yield each command with its path, and its short help if its group lists it from a table."""

    def below(words: str, group: Any) -> Iterator[tuple[str, Any, str | None]]:
        table = getattr(group, "table", {})
        for name in group.list_commands(None):
            command, path = group.get_command(None, name), f"{words} {name}".strip()
            yield path, command, table[name].help if name in table else None
            if hasattr(command, "list_commands"):
                yield from below(path, command)

    yield from below("", main.Subcommands(name="heapline"))


COMMANDS = {path: (command, listed) for path, command, listed in every_command()}
#: First words of help: what the command does.
VERBS = {
    "Add", "Cancel", "Change", "Check", "Copy", "Create", "Cut", "Delete", "Deliver", "Disable", "Enable", "Enqueue",
    "Erase", "Forecast", "Forget", "Inspect", "Join", "Lease", "List", "Manage", "Measure", "Move", "Open", "Print",
    "Prove", "Read", "Relay", "Remove", "Replace", "Report", "Resume", "Return", "Revoke", "Run", "Send", "Serve",
    "Show", "Stop", "Watch",
}  # fmt: skip


@pytest.mark.parametrize("path", COMMANDS)
def test_help_begins_with_a_verb_and_shows_an_example(path: str) -> None:
    command, listed = COMMANDS[path]
    help = " ".join((command.help or "").split())
    assert help.split()[0].rstrip(",") in VERBS, help
    if listed is not None:
        first = help.partition(". ")[0].rstrip(".")
        assert first.startswith(listed.rstrip(".")), "the table of the lazy group and the command's own help differ"
    assert f"heapline {path}" in help, "no example"


@pytest.mark.parametrize("path", COMMANDS)
def test_flags_are_shown_as_flags_and_every_option_has_help(path: str) -> None:
    command, _ = COMMANDS[path]
    shown = runner.invoke(main.app, [*path.split(), "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "<bool>" not in shown.stdout
    assert "BOOLEAN" not in shown.stdout
    assert not [param.name for param in command.params if not param.help]


@pytest.mark.parametrize("path", COMMANDS)
def test_help_wraps_at_the_width_of_the_terminal(path: str) -> None:
    """A line break of the source would end a line early. One after a colon, before a command, stays."""
    help = COMMANDS[path][0].help or ""
    assert [part for part in help.split("\n\n") if "\n" in part.replace(":\n", "")] == []


@pytest.mark.parametrize("arguments", [["--help"], ["topic", "--help"], ["serve", "--help"], ["worker", "--help"]])
def test_help_imports_no_heavy_package(arguments: list[str]) -> None:
    program = (
        "import sys; from heapline.cli.main import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert not {"grpc", "fastapi", "numpy", "pyspark", "uvicorn", "sqlalchemy", "opentelemetry", "jwt"} & loaded


def complete(words: str) -> list[str]:
    """Return the completions that a shell would offer for the last word."""
    environment = {
        **os.environ, "_HEAPLINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
    }  # fmt: skip
    command = [sys.executable, "-m", "heapline"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_shell_completion_offers_commands_subcommands_and_options() -> None:
    assert complete("heapline to") == ["topic", "top"]
    assert complete("heapline topic p") == ["pause", "purge"]
    assert complete("heapline group dead re") == ["replay"]
    assert "--priority" in complete("heapline put jobs --p")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "heapline", "--show-completion", shell]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "_HEAPLINE_COMPLETE" in shown


def test_python_m_heapline_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "heapline", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: heapline" in result.stdout


def test_closed_streams_are_accepted() -> None:
    """Cron jobs and supervisors may close the streams that they do not read."""
    command = f"'{sys.executable}' -m heapline demo --help <&- >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_closed_stdin_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
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
