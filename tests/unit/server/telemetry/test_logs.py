"""Log lines in both formats, and which format is chosen."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from heapline.logs import Log
from heapline.server.settings import read_settings
from heapline.server.telemetry.logs import configure

log = Log("heapline.server")
KEY = "hl_0011223344556677_" + "k" * 43


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_line_has_time_level_logger_event_and_facts() -> None:
    stream = io.StringIO()
    configure(None, stream)
    log.info("topic refused", topic="jobs", count=3, error=ValueError("x"))
    line = json.loads(stream.getvalue())
    assert list(line)[:4] == ["time", "level", "logger", "event"]
    assert (line["level"], line["logger"], line["event"]) == ("info", "heapline.server", "topic refused")
    assert line["facts"] == {"topic": "jobs", "count": 3, "error": "x"}
    assert line["time"].endswith("Z")


def test_facts_named_like_a_field_of_the_line_do_not_replace_it() -> None:
    stream = io.StringIO()
    configure("json", stream)
    log.warning("something", level="high", time=3)
    line = json.loads(stream.getvalue())
    assert line["level"] == "warning"
    assert line["facts"] == {"level": "high", "time": 3}


def test_log_format_defaults_to_text_on_a_terminal_else_json() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    configure(None, terminal)
    log.info("serving", port=1)
    assert terminal.getvalue().endswith("INFO serving port=1\n")
    configure("text", pipe)
    log.info("serving", port=1)
    assert pipe.getvalue().endswith("INFO serving port=1\n")
    configure("json", terminal)
    log.info("serving")
    assert json.loads(terminal.getvalue().splitlines()[-1])["event"] == "serving"


@pytest.mark.parametrize("format", ["text", "json"])
def test_secrets_are_removed_from_lines_and_tracebacks(format: str) -> None:
    stream = io.StringIO()
    configure(format, stream)  # type: ignore[arg-type]
    try:
        raise RuntimeError(f"could not use {KEY}")
    except RuntimeError:
        log.exception("failed", header=f"Bearer {KEY}")
    assert "RuntimeError" in stream.getvalue()
    assert "k" * 43 not in stream.getvalue()


def test_server_setting_for_the_collector_overrides_the_usual_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().otlp_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318")
    assert read_settings().otlp_endpoint == "http://a:4318"
    monkeypatch.setenv("HEAPLINE_OTLP_ENDPOINT", "http://b:4318")
    assert read_settings().otlp_endpoint == "http://b:4318"
