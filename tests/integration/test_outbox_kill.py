"""Writers and relays of an outbox are killed: each message is enqueued once if and only if its order exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def killed(directory: Path, setting: str, kills: int, seed: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.integration.outbox_killer", str(directory), setting, str(kills), str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    print(result.stderr)  # shown when the counts are wrong
    counts: dict[str, int] = json.loads(result.stdout)
    return counts


def check(counts: dict[str, int], kills: int) -> None:
    assert counts["killed_alive"] == kills
    assert counts["committed"] > kills
    wrong = {name: counts[name] for name in ("missing", "invented", "doubled", "failed", "left")}
    assert wrong == {"missing": 0, "invented": 0, "doubled": 0, "failed": 0, "left": 0}
    assert counts["enqueued"] == counts["committed"]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["directory", "server"])
def test_messages_are_enqueued_once_iff_their_transaction_committed(tmp_path: Path, setting: str) -> None:
    check(killed(tmp_path, setting, kills=20, seed=1), 20)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("setting", ["directory", "server"])
def test_messages_are_enqueued_once_iff_committed_over_many_kills(tmp_path: Path, setting: str, seed: int) -> None:
    counts = killed(tmp_path, setting, kills=300, seed=seed)
    check(counts, 300)
    assert counts["left_rows_in_doubt"] > 0
