"""Which pages and parts the broker behind the server has something for."""

from __future__ import annotations

from heapline.contract.admin import Describe
from heapline.dashboard.caller import Caller


async def features_of(caller: Caller) -> frozenset[str]:
    return frozenset((await caller.do(Describe())).features)
