"""SQL by name. Every statement is a block of a file in queries/, which begins with the line `-- name: <name>`.

A block may contain placeholders in braces, which the layout fills in (names of tables, lists of columns). Values are
always parameters.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def parse_blocks(text: str, source: str) -> dict[str, str]:
    """Return the blocks of a file by name."""
    parts = _NAME.split(text)
    blocks: dict[str, str] = {}
    for name, block in zip(parts[1::2], parts[2::2], strict=True):
        if name in blocks:
            raise ValueError(f"{source} has two blocks with the name {name}")
        if not block.strip():
            raise ValueError(f"block {name} of {source} is empty")
        blocks[name] = block.strip().rstrip(";")
    return blocks


@cache
def all_blocks() -> dict[str, str]:
    """Return every block of every file. Names are unique over all files."""
    found: dict[str, str] = {}
    for file in sorted(files("heapline.sql").joinpath("queries").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".sql"):
            blocks = parse_blocks(file.read_text(encoding="utf-8"), file.name)
            if repeated := found.keys() & blocks.keys():
                raise ValueError(f"{file.name} repeats the names {sorted(repeated)}")
            found |= blocks
    return found


@cache
def statement(name: str, **values: str) -> str:
    """Return a block with its placeholders filled in."""
    return fill(all_blocks()[name], values)


def fill(block: str, values: dict[str, str]) -> str:
    """Fill in placeholders. One without a value, or a value without a placeholder, raises KeyError."""
    names = set(_PLACEHOLDER.findall(block))
    if names != values.keys():
        raise KeyError(f"placeholders {sorted(names)} do not match the values {sorted(values)}")
    return _PLACEHOLDER.sub(lambda match: values[match[1]], block)
