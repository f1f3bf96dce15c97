"""Output of commands, for people and as JSON."""

from __future__ import annotations

import doctest
import io

import pytest
from rich.console import Console

from heapline.cli import output


def test_examples_in_the_docstrings_hold() -> None:
    result = doctest.testmod(output)
    assert (result.attempted >= 5, result.failed) == (True, 0)


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_take_the_unit_that_reads_best(nbytes: int, shown: str) -> None:
    assert output.size(nbytes) == shown


def test_table_shows_markup_of_values_and_cuts_nothing_off() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=output.PLAIN_WIDTH)
    console.print(output.facts_table("title", [("what", "[red]" + "x" * 300 + "[/red]")]))
    assert stream.getvalue().count("x") == 300


def test_progress_bar_is_silent_without_a_terminal() -> None:
    stream = io.StringIO()
    with output.progress_bar(Console(file=stream)) as bar:
        bar.advance(bar.add_task("work", total=2))
    assert stream.getvalue() == ""
