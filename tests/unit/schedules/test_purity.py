from __future__ import annotations

import ast
from pathlib import Path

import pytest

import heapline.core.schedules
from tests.unit.test_house import WORLD, imported_modules

ROOM = Path(heapline.core.schedules.__file__).parent


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_time_is_passed_in_and_nothing_is_read_or_sent(path: Path) -> None:
    """Except for the machine's time zone table, which zoneinfo reads."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert {name.partition(".")[0] for name in imported_modules(tree)} & WORLD == set()
    assert "datetime.now" not in {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
