"""Output of a benchmark module while it runs: rows, one per figure, and steps in between."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

#: A target such as "≤ 1.5×" is about the ratio itself, so a lower ratio is better.
RATIO_AT_MOST = re.compile(r"\s*(?:≤|<=?)\s*[\d.]+\s*[×x]")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, as `benchmarks/__init__.py` describes it; `error` is set if there is no figure."""

    name: str
    value: float | None = None
    unit: str | None = None
    baseline: float | None = None
    ratio: float | None = None
    target: float | str | None = None
    met: bool | None = None
    better: Literal["higher", "lower"] = "higher"
    error: str | None = None
    #: About a baseline that is another product: `peer`, `version`, `durability`. It has a separate table.
    about: dict[str, str] | None = None

    @classmethod
    def from_yielded(cls, yielded: dict[str, Any]) -> Row:
        missing = {"name", "value", "unit", "baseline", "ratio", "target", "met"} - yielded.keys()
        unknown = yielded.keys() - {field.name for field in fields(cls)}
        if missing or unknown:
            raise ValueError(f"a benchmark yielded {yielded!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        return cls(**{"better": "lower" if RATIO_AT_MOST.match(str(yielded["target"])) else "higher", **yielded})


@dataclass(frozen=True)
class Step:
    """Yielded between rows by a slow module: its next step, and how much of its work is done."""

    text: str
    done: int
    total: int
