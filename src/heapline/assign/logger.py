"""The log of one worker: the standard library's logging, or an object that the user passes to the manager.

Heapline calls `info`, `warn` and `error`, with a short event such as "assign.claimed" and with facts. It never calls
`fatal`, which ends the process in some libraries. A logger that raises affects nothing else.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

from heapline.assign.errors import BadConfig
from heapline.logs import Log

METHODS = ("debug", "info", "warn", "error", "fatal")
NAME = "heapline.assign"


class Logger(Protocol):
    """A structured logger, such as those of structlog. `(message, *keys_and_values)` will do as well."""

    def debug(self, message: str, /, **key_values: Any) -> object: ...
    def info(self, message: str, /, **key_values: Any) -> object: ...
    def warn(self, message: str, /, **key_values: Any) -> object: ...
    def error(self, message: str, /, **key_values: Any) -> object: ...
    def fatal(self, message: str, /, **key_values: Any) -> object: ...


def log_to(logger: Logger | logging.Logger | None) -> Log:
    """Return a log that writes to this logger; by default to that named "heapline.assign"."""
    if logger is None or isinstance(logger, logging.Logger):
        return Log(NAME if logger is None else logger.name)
    if missing := [name for name in METHODS if not callable(getattr(logger, name, None))]:
        raise BadConfig(f"logger has no method {', '.join(missing)}; it needs {', '.join(METHODS)}")
    return _LoggerLog(logger)


class _LoggerLog(Log):
    def __init__(self, logger: Logger) -> None:
        super().__init__(NAME)
        self._methods = {logging.INFO: logger.info, logging.WARNING: logger.warn, logging.ERROR: logger.error}

    def _write(self, level: int, event: str, facts: dict[str, Any], trace: bool | BaseException = False) -> None:
        method: Callable[..., object] = self._methods[level]
        try:
            if _takes_pairs(method):
                method(event, *chain.from_iterable(facts.items()))
            else:
                method(event, **facts)
        except Exception as error:
            super()._write(logging.WARNING, "assign.logger_failed", {"error": type(error).__name__}, trace=error)


def _takes_pairs(method: Callable[..., object]) -> bool:
    """Return whether it takes keys and values alternately, not as keywords."""
    try:
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    except (TypeError, ValueError):  # a function in C
        return False
    return inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD not in kinds
