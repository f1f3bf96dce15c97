"""The short memory of how messages went."""

from __future__ import annotations

import numpy as np
import pytest

from heapline.core.gone import GoneMemory


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_messages_that_went_one_by_one_keep_their_own_times() -> None:
    memory = GoneMemory()
    for id in range(5):
        memory.add(column(id), "acked", 100 + id, tokens=column(id + 50))
    for id in range(5):
        gone = memory.find(id)
        assert gone is not None
        assert gone.at == 100 + id
