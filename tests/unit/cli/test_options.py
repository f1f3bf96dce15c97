"""Durations, sizes and times as people type them."""

from __future__ import annotations

import doctest
import io
from datetime import UTC, datetime, timedelta

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from heapline.cli import group, message_view, options, output
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
