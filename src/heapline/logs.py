"""Events for operators, through the standard library's logging: a short sentence, and facts as `extra`.

A program that embeds Heapline configures where they go; the server writes them as JSON. They never contain payloads.
This module is small because `import heapline` should cost little.
"""

from __future__ import annotations

import logging
from typing import Any


class Log:
    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _write(self, level: int, event: str, facts: dict[str, Any], trace: bool | BaseException = False) -> None:
        if self._logger.isEnabledFor(level):
            shown = " ".join(f"{name}={value!r}" for name, value in facts.items())
            self._logger.log(level, "%s %s", event, shown, extra={"event": event, "facts": facts}, exc_info=trace)

    def info(self, event: str, **facts: Any) -> None:
        self._write(logging.INFO, event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._write(logging.WARNING, event, facts)

    def error(self, event: str, **facts: Any) -> None:
        self._write(logging.ERROR, event, facts)

    def exception(self, event: str, error: BaseException | None = None, /, **facts: Any) -> None:
        """Log with the traceback of an exception: the one being handled, if none is given."""
        self._write(logging.ERROR, event, facts, trace=True if error is None else error)
