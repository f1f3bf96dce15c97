"""Pages and parts that the broker behind the server has data for."""

from __future__ import annotations

from heapline.contract.admin import Describe
from heapline.dashboard.caller import Caller


async def features_of(caller: Caller) -> frozenset[str]:
    return frozenset((await caller.do(Describe())).features)
