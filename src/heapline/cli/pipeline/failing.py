"""What a job died of, in a line: Spark tells it with the stacks of Java and of its Python workers around it.

Knows the looks of such texts and nothing of Spark's classes, so it needs no Spark. With HEAPLINE_TRACEBACK=1 in the
environment everything is shown.
"""

from __future__ import annotations

import os
import re

from heapline.errors import BadRequest, HeaplineError

WHOLE = "HEAPLINE_TRACEBACK"
_PYTHON = "Traceback (most recent call last):"
#: The last line of a traceback: a class with its module, and what it says.
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*): (.+)$", re.MULTILINE)


class JobFailed(HeaplineError):
    """Spark ended the job; what was committed before is there."""


def told(error: Exception) -> HeaplineError | None:
    """What to show instead of the error; None: it is none of those that are known here, or all is to be shown."""
    if isinstance(error, HeaplineError) or os.environ.get(WHOLE):
        return None
    origin = type(error).__module__.partition(".")[0]
    if isinstance(error, ModuleNotFoundError):
        missing = str(error.name).partition(".")[0]
        if missing == "heapline":
            return None
        return BadRequest(
            f"jobs need {missing!r}: run pip install 'heapline[spark-local]', or 'heapline[spark,lake]' where there is "
            "a Spark already"
        )
    if origin not in ("pyspark", "py4j"):
        return None
    return JobFailed(f"{reason(str(error))} (all of it: {WHOLE}=1)")


def reason(text: str) -> str:
    """
    >>> reason("Failed\\nTraceback (most recent call last):\\n  File x\\nheapline.errors.TopicFull: full\\n\\tat a.b")
    'TopicFull: full'
    >>> reason("[UNRESOLVED_COLUMN] no column. SQLSTATE: 42703\\n'Project")
    '[UNRESOLVED_COLUMN] no column. SQLSTATE: 42703'
    """
    _, found, inner = text.rpartition(_PYTHON)
    raised = _RAISED.search(inner) if found else None
    if raised is not None:
        return f"{raised[1]}: {raised[2]}"
    lines = [line.strip(" :") for line in text.splitlines() if line.strip()]
    java = next((line for line in lines if re.match(r"(?:[a-z]\w*\.)+[A-Z]\w*: ", line)), None)
    return java or (lines[0] if lines else "Spark does not say why")
