"""How much a worker should carry: the share, the bounds around it, and the partitions to which no bound can apply.

The *share* is what each worker would carry if weight could be cut anywhere. Loads should be within `bound` × share and
(2 − bound) × share. A partition that is itself above the bound, a *giant*, gets a worker of its own, and the share of
the others is what is left for the workers that are left: so one giant does not make the bounds of all others
meaningless. Who gets what is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

import numpy as np
import numpy.typing as npt

from heapline.assign.ring import Indexes

Weights = npt.NDArray[np.float64]
#: Sums of floats are compared with limits that they may reach exactly.
TOLERANCE = 1 + 1e-9
#: How much those that cost nothing count together, next to the others.
ZEROS_SHARE = 0.001


@dataclass(slots=True)
class Bounds:
    """For certain weights and so many workers."""

    share: float
    low: float
    high: float
    giants: Indexes  # heaviest first


def bounds_of(weights: Weights, worker_count: int, bound: float) -> Bounds:
    """`weights` are sorted, heaviest first."""
    # Summed up from the lightest, so that no giant swallows what comes after it.
    left = np.cumsum(weights[::-1])[::-1]
    workers, giants = worker_count, 0
    while giants < len(weights) and workers > 1 and weights[giants] * workers > bound * left[giants] * TOLERANCE:
        workers, giants = workers - 1, giants + 1
    rest = weights[giants:]
    share = float(left[giants]) / workers if len(rest) else 0.0
    low, high = (2 - bound) * share, bound * share
    if len(rest) and rest[0] == rest[-1]:
        # All alike: nobody can carry a part of one, so the whole numbers next to the share are within bounds.
        unit = float(rest[0])
        whole = share / unit
        low, high = min(low, floor(whole * TOLERANCE) * unit), max(high, ceil(whole / TOLERANCE) * unit)
    return Bounds(share, low, high, np.arange(giants))


def without_zeros(weights: Weights) -> Weights:
    """What costs nothing still goes somewhere, and evenly: all of it counts a thousandth of the others together."""
    zero = weights == 0
    if not zero.any():
        return weights
    if zero.all():
        return np.ones_like(weights)
    lightest, ratio = weights[~zero].min(), (len(zero) - zero.sum()) / zero.sum()
    return np.where(zero, lightest * min(1.0, ZEROS_SHARE * ratio), weights)
