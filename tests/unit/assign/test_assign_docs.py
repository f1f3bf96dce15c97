"""docs/assign.md matches the code's configuration, states and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from heapline.assign.config import Config
from heapline.assign.metrics import FAMILIES
from heapline.assign.states import mermaid

PAGE = (Path(__file__).parents[3] / "docs" / "assign.md").read_text(encoding="utf-8")


def test_configuration_table_has_every_field_with_its_default() -> None:
    expected = {}
    for name, value in Config().to_dict().items():
        inner = {f"{name}.{field}": each for field, each in value.items()} if isinstance(value, dict) else {name: value}
        expected.update({field: each if isinstance(each, str) else f"{each:g}" for field, each in inner.items()})
    table = PAGE.split("## Configuration")[1].split("## States")[0]
    assert dict(re.findall(r"^\| `([\w.]+)` \| ([\w.]+) \|", table, re.MULTILINE)) == expected


def test_state_diagram_is_the_generated_one() -> None:
    assert f"```mermaid\n{mermaid()}```" in PAGE, "python -m heapline.assign.states prints it"


def test_every_metric_is_named() -> None:
    assert [name for name in FAMILIES if f"`{name}`" not in PAGE] == []
