"""Functions of Heapline that one warm enqueue enters: a reader must know them to follow the call."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from heapline import accelerator

ROOT = Path(__file__).parents[3]
#: The goals. Do not raise them.
MOST = {"embedded enqueue": 110, "SDK to server enqueue": 190}


def test_enqueue_enters_no_more_functions_than_before() -> None:
    counted = subprocess.run(
        [sys.executable, "-m", "benchmarks.functions"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    found = {name: int(count) for name, count in re.findall(r"^(.+): (\d+) functions", counted, re.MULTILINE)}
    assert found.keys() == MOST.keys()
    if accelerator.native is not None:  # its twins are functions too
        assert {name: count for name, count in found.items() if count > MOST[name]} == {}
