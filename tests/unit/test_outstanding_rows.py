"""Outstanding rows are counted like a plain set, in large batches or small."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heapline.contract.member_rows import FEW, RowsOut

SIZES = st.sampled_from([1, 3, FEW - 1, FEW, 5 * FEW])


@given(st.lists(st.tuples(st.integers(0, 1), SIZES, st.integers(0, 3), st.randoms(use_true_random=False)), max_size=12))
def test_outstanding_rows_are_those_added_and_not_ended(steps: list[tuple[int, int, int, object]]) -> None:
    out, model = RowsOut(), dict[tuple[int, int], float]()
    following = [0, 0]
    for number, (partition, size, kind, rng) in enumerate(steps):
        offsets = np.arange(following[partition], following[partition] + 2 * size, 2)
        following[partition] += 2 * size
        out.add(partition, offsets, float(number))
        model |= {(partition, o): float(number) for o in offsets.tolist()}
        held = [o for p, o in model if p == partition]
        if kind == 0:
            ended = offsets
        elif kind == 1:
            ended = np.array(rng.sample(held, len(held) // 2), dtype=np.int64)  # type: ignore[attr-defined]
        elif kind == 2:
            ended = np.array([*held, 10_000_001], dtype=np.int64)
        else:
            ended = offsets[:0]
            out.forget(number - 1)
            model = {row: until for row, until in model.items() if until > number - 1}
        out.end(partition, ended)
        for offset in ended.tolist():
            model.pop((partition, offset), None)
        assert out.rows == len(model)


def test_rows_redelivered_in_due_order_are_counted() -> None:
    out = RowsOut()
    offsets = np.random.default_rng(1).permutation(np.arange(0, 8 * FEW, 2))
    out.add(0, offsets, 1.0)
    out.end(0, offsets[:FEW])
    assert out.rows == 3 * FEW
    out.end(0, offsets[FEW:])
    assert out.rows == 0
