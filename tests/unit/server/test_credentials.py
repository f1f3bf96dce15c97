"""Long calls end with their credential, and for no other reason."""

from __future__ import annotations

import asyncio

import pytest

from heapline.contract.errors import Unauthenticated
from heapline.server.auth.principals import LOCAL, NoAuthGuard, Principal
from heapline.server.credentials import Credentials


class Some(NoAuthGuard):
    def __init__(self) -> None:
        self.out: set[str] = set()
        self.asked = 0

    def is_valid(self, principal: Principal) -> bool:
        self.asked += 1
        return principal.subject not in self.out


class Request:
    def __init__(self, caller: Principal) -> None:
        self.caller = caller


async def forever(lasting: Credentials, principal: Principal = LOCAL) -> None:
    with lasting.hold(Request(principal)):
        await asyncio.Event().wait()


async def test_only_calls_of_the_revoked_caller_are_ended() -> None:
    guard = Some()
    lasting, other = Credentials(guard), Principal("key:other", ())
    mine = [asyncio.create_task(forever(lasting)) for _ in range(100)]
    stays = asyncio.create_task(forever(lasting, other))
    await asyncio.sleep(0)
    guard.out.add("local")
    lasting.check()
    assert guard.asked == 2  # once per principal, not per call
    reported = await asyncio.gather(*mine, return_exceptions=True)
    assert {type(t) for t in reported} == {Unauthenticated}
    assert len(lasting) == 1
    assert not stays.done()
    stays.cancel()


async def test_cancellation_from_outside_is_still_a_cancellation() -> None:
    lasting = Credentials(Some())
    task = asyncio.create_task(forever(lasting))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(lasting) == 0


async def test_result_that_arrives_with_the_revocation_is_discarded() -> None:
    guard = Some()
    lasting = Credentials(guard)

    async def stubborn() -> str:
        with lasting.hold(Request(LOCAL)):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "a message"
        raise AssertionError

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    guard.out.add("local")
    lasting.check()
    with pytest.raises(Unauthenticated):
        await task


async def test_task_continues_after_its_block_was_ended() -> None:
    guard = Some()
    lasting = Credentials(guard)

    async def work() -> str:
        with pytest.raises(Unauthenticated):
            await forever(lasting)
        await asyncio.sleep(0)
        return "reported"

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    guard.out.add("local")
    lasting.check()
    assert await task == "reported"


async def test_call_of_a_renewed_caller_lasts_as_long_as_the_new_credential() -> None:
    guard = Some()
    lasting, request = Credentials(guard), Request(LOCAL)

    async def hold() -> None:
        with lasting.hold(request):
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    request.caller = Principal("renewed", ())
    guard.out.add("local")
    lasting.check()
    assert len(lasting) == 1
    guard.out.add("renewed")
    lasting.check()
    with pytest.raises(Unauthenticated):
        await task
