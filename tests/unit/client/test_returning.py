"""What becomes of a pop that its caller gave up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.client.returning import Returns


@pytest.mark.parametrize("is_named", [False, True])
async def test_leases_of_a_pop_given_up_go_back_unless_it_has_a_name_to_repeat_it_by(is_named: bool) -> None:
    released: list[Any] = []
    answered = asyncio.Event()

    async def popping() -> Any:
        await answered.wait()
        return ["leased"]

    async def release(messages: Any) -> None:
        released.extend(messages)

    returns = Returns(release)
    asking = asyncio.ensure_future(returns.pop(popping(), waits=False, is_named=is_named))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    answered.set()
    await returns.close()
    assert released == ([] if is_named else ["leased"])
