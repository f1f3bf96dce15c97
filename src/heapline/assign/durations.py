"""Durations as people write them, "1m30s" or 90, and a field of a dataclass that takes both and gives seconds."""

from __future__ import annotations

import math
import re
from typing import Any, overload

from heapline.assign.errors import BadConfig

SECONDS_MAX = 366 * 86400.0
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(value: object, name: str = "duration") -> float:
    """Seconds as a float, of a number of seconds or of text such as "30s", "1.5s", "250ms", "1m30s"."""
    if isinstance(value, str):
        text = value.strip()
        parts = PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise BadConfig(
                f'{name}={value!r} is not a duration: write "30s", "250ms" or "1m30s", or a number of seconds'
            )
        found = sum(float(number) * UNITS[unit] for number, unit in parts)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    else:
        raise BadConfig(f'{name}={value!r} is not a duration: write "30s", or a number of seconds')
    if not (math.isfinite(found) and 0 <= found <= SECONDS_MAX):
        raise BadConfig(f"{name}={value!r} is not a duration: it must be from 0 to {SECONDS_MAX:.0f} seconds")
    return found


class Duration:
    """A field whose value may be given in either form and is always read as seconds."""

    def __init__(self, default: float) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._slot = "_" + name

    @overload
    def __get__(self, instance: None, owner: type) -> float: ...
    @overload
    def __get__(self, instance: object, owner: type) -> float: ...
    def __get__(self, instance: Any, owner: type) -> float:
        # Asked for by the class, it gives the default: that is how a dataclass learns it.
        return self._default if instance is None else float(instance.__dict__[self._slot])

    def __set__(self, instance: Any, value: float | str) -> None:
        instance.__dict__[self._slot] = seconds(value, self._name)
