"""The server imports the contract and no engine."""

from __future__ import annotations

import re
from pathlib import Path

import heapline.server

ENGINE = re.compile(r"^\s*(?:from|import) heapline\.engine\b", re.MULTILINE)


def test_no_module_of_the_server_imports_the_engine() -> None:
    (root,) = heapline.server.__path__
    importing = [str(file) for file in Path(root).rglob("*.py") if ENGINE.search(file.read_text())]
    assert importing == []
