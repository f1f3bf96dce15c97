"""Declarations of options, and durations, sizes and times as people type them."""

from __future__ import annotations

import doctest
import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta
from rich.console import Console
from typer.testing import CliRunner

from heapline.cli import group, message_view, options, output
from heapline.cli.main import CommandGroup
from heapline.cli.options import Env, Panel, Seconds
from heapline.cli.output import facts_table, harmless


def test_examples_in_the_docstrings_hold() -> None:
    for module, examples in ((options, 7), (output, 6), (message_view, 1), (group, 1)):
        result = doctest.testmod(module)
        assert (result.attempted >= examples, result.failed) == (True, 0)


@given(st.integers(0, 10**12))
def test_formatted_duration_parses_back_within_its_second_unit(ms: int) -> None:
    seconds = ms / 1000
    back = options.duration(options.span(seconds))
    smallest = 0.001 if seconds < 60 else 1 if seconds < 3600 else 60 if seconds < 86400 else 3600
    assert 0 <= seconds - back + 1e-6 < smallest + 1e-3


@pytest.mark.parametrize("text", ["", "5x", "-5s", "5 minutes", "s", "1e3", "nan", "5m-3s", "٣s"])
def test_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="30s, 5m"):
        options.duration(text)


@pytest.mark.parametrize("text", ["", "64MB", "-1", "1.5MiB", "1TiB", "x"])
def test_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="64KiB"):
        options.nbytes(text)


@pytest.mark.parametrize(("text", "nbytes"), [("1G", 1 << 30), ("3 KiB", 3072), ("7b", 7), ("0", 0)])
def test_sizes_are_binary(text: str, nbytes: int) -> None:
    assert options.nbytes(text) == nbytes


def test_time_needs_a_time_zone() -> None:
    assert options.instant("2030-01-31T12:00:00+02:00") == datetime(2030, 1, 31, 10, tzinfo=UTC)
    for text, said in (("2030-01-31T12:00:00", "time zone"), ("tomorrow", "not a time")):
        with pytest.raises(typer.BadParameter, match=said):
            options.instant(text)


def test_past_is_a_time_or_how_long_ago() -> None:
    assert abs(options.past("2h") - (datetime.now(UTC) - timedelta(hours=2))) < timedelta(minutes=5)
    assert options.past("2030-01-31T12:00:00Z") == datetime(2030, 1, 31, 12, tzinfo=UTC)
    for text, said in (("soon", "or how long ago"), ("999999999w", "too long ago")):
        with pytest.raises(typer.BadParameter, match=said):
            options.past(text)


@pytest.mark.parametrize("text", ["a", "=b", ""])
def test_invalid_pair_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="NAME=VALUE"):
        options.pair(text)


@given(st.text(st.sampled_from("\\[]/adim\x1b\x9b\u202e"), min_size=1))
def test_foreign_text_is_escaped_and_never_markup(text: str) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=10_000)
    console.print(message_view.full_payload(text.encode()))
    console.print(facts_table("", [(harmless(text), harmless(text))]))
    spelled = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    assert stream.getvalue().count(spelled) >= 3
    assert not set("\x1b\x9b\u202e") & set(stream.getvalue())


def run(command: Callable[..., None], *arguments: str) -> Any:
    group = CommandGroup("try", example="try", help="Try options.")
    group.command("other")(lambda: None)
    group.command("try")(command)
    return CliRunner().invoke(group, ["try", *arguments], env={"COLUMNS": "200"})


def test_flag_follows_from_the_name_unless_another_is_given() -> None:
    def command(
        max_rows: Annotated[int, "-n", "Rows."] = 1,
        every: Annotated[bool, "--all", "All rows."] = False,
        wait: Annotated[Seconds | None, "Wait."] = None,
    ) -> None:
        print(max_rows, every, wait)

    assert run(command).stdout == "1 False None\n"
    assert run(command, "-n", "2", "--all", "--wait", "1m").stdout == "2 True 60.0\n"
    assert run(command, "--max-rows", "3").stdout == "3 False None\n"


def test_default_duration_is_shown_as_it_is_typed() -> None:
    def command(wait: Annotated[Seconds, "Wait."] = 90.0) -> None:
        print(wait)

    assert "[default: 1m30s]" in run(command, "--help").stdout
    assert run(command).stdout == "90.0\n"


def test_value_out_of_bounds_is_refused_with_its_option() -> None:
    def command(rows: Annotated[int, "Rows.", Meta(ge=1, le=9)] = 1) -> None:
        print(rows)

    refused = run(command, "--rows", "10")
    assert (refused.exit_code, "--rows" in refused.stderr) == (2, True)


def test_environment_sets_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(rows: Annotated[list[int] | None, "Rows.", Env("HEAPLINE_TEST_ROWS")] = None) -> None:
        print(rows)

    monkeypatch.setenv("HEAPLINE_TEST_ROWS", "1 2")
    assert run(command).stdout == "[1, 2]\n"


def test_command_takes_the_value_that_a_part_builds_from_its_options() -> None:
    def area(width: Annotated[int, "Width.", Panel("Size")], height: Annotated[int, "Height."] = 2) -> int:
        return width * height

    @options.takes(size=area)
    def command(size: int, name: Annotated[str, "Name."] = "box") -> None:
        """Show an area."""
        print(name, size)

    assert run(command, "--width", "3").stdout == "box 6\n"
    assert run(command, "--width", "3", "--height", "5", "--name", "hall").stdout == "hall 15\n"
    assert "Show an area." in run(command, "--help").stdout
