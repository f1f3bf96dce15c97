"""Leases of a pop whose caller was cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heapline.client.transports.transport import Transport
from heapline.contract.call import Context
from heapline.contract.columns import pack
from heapline.contract.errors import UnavailableError
from heapline.contract.leases import Leased, LeasedMessages, Pop, Release, Settled

ONE = pack([1])
LEASED = Leased("jobs", LeasedMessages(ONE, pack([7]), [b""], ONE, memoryview(b"\1"), ONE, ONE))


class Silent(Transport):
    """Does not answer the first request."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self.commands: list[Any] = []
        self.answers = list(answers)

    async def _request(self, command: Any, context: Context) -> Any:
        self.commands.append(command)
        if len(self.commands) == 1:
            await asyncio.sleep(3600)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def cancelled(transport: Silent, command: Pop) -> None:
    popping = asyncio.ensure_future(transport.do(command))
    await asyncio.sleep(0)
    popping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await popping
    await transport.leases_returned()


async def test_cancelled_pop_is_repeated_under_its_request_id_and_its_leases_are_released() -> None:
    transport = Silent(LEASED, Settled())
    await cancelled(transport, Pop("jobs", 5, wait=20.0))
    first, again, release = transport.commands
    assert first.request_id is not None
    assert (again.request_id, again.wait) == (first.request_id, 0.0)
    assert type(release) is Release
    assert (bytes(release.leases.ids), bytes(release.leases.tokens)) == (bytes(ONE), bytes(pack([7])))


async def test_cancelled_pop_with_the_caller_s_request_id_keeps_its_leases() -> None:
    transport = Silent()
    await cancelled(transport, Pop("jobs", request_id="mine"))
    assert len(transport.commands) == 1


@pytest.mark.parametrize("answer", [Leased("jobs"), UnavailableError("gone")])
async def test_cancelled_pop_that_leased_nothing_or_cannot_be_repeated_is_left_alone(answer: Any) -> None:
    transport = Silent(answer)
    await cancelled(transport, Pop("jobs"))
    assert len(transport.commands) == 2
