"""Run the Python of docs/lake.md from the first block to the last, in the Spark of all tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.pages import ROOT, Ports, Reader, blocks_of
from tests.spark.conftest import MARKS

pytestmark = MARKS


def test_lake_page_runs(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "lake.md").read_text(encoding="utf-8")
    blocks = [dataclasses.replace(block, reason=None) for block in blocks_of(text)]
    walked = [block for block in blocks if block.language != "sh" or "lake show" in block.body]
    with Reader(tmp_path, Ports(1, 1)) as reader:
        reader.follow("lake.md", walked, {"pipeline"})
