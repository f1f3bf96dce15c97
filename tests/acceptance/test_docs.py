"""The code that README and docs show must run.

Every block fenced as ```python in README.md and docs/*.md is executed by itself, in an empty directory, as a script
that may `await` at top level. A block that cannot run alone is fenced as ```python no-run.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Each block that should run, with the number of lines before it."""
    return [
        (text.count("\n", 0, block.start("body")), block["body"])
        for block in FENCE.finditer(text)
        if block["info"].split() == ["python"]
    ]


def run_block(source: str, name: str, lines_before: int) -> None:
    # The blank lines make a traceback point into the document itself.
    code = compile("\n" * lines_before + source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    module = types.ModuleType("__main__")
    outcome = eval(code, module.__dict__)
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)


def documented_blocks() -> list[object]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for lines_before, source in python_blocks(path.read_text(encoding="utf-8")):
            found.append(pytest.param(path, lines_before, source, id=f"{path.name}:{lines_before + 1}"))
    return found


@pytest.mark.parametrize(("path", "lines_before", "source"), documented_blocks())
def test_documented_code_runs(
    path: Path, lines_before: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_block(source, str(path), lines_before)


def test_readme_shows_code_that_runs() -> None:
    assert python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))


def test_only_plain_python_blocks_are_run() -> None:
    text = "a\n```python\nx = 1\n```\n```python no-run\ny\n```\n```sh\nz\n```\n"
    assert python_blocks(text) == [(2, "x = 1\n")]


def test_a_block_may_await_and_its_failure_names_the_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_block("import asyncio\nawait asyncio.sleep(0)\n1 / 0\n", "doc.md", 10)
    assert caught.traceback[-1].lineno == 12  # counted from 0
