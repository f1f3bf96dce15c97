"""The blocking client: one loop for everything created from it, and no caller waits forever when it is closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import heapline
from heapline.client.sdk import ConnectedBroker
from heapline.client.sync import SyncClient
from heapline.contract.call import Context, Page
from heapline.contract.errors import Closed


class Wire:
    """Replaces a channel: answers every call with None, or never."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.silent = False
        self.calls: list[tuple[str, float]] = []
        self.loops: set[Any] = set()

    async def do(self, command: Any, context: Context) -> Any:
        assert context.deadline is not None
        seconds = context.deadline - asyncio.get_running_loop().time()
        self.calls.append((type(command).facts.rpc, seconds))
        self.loops.add(asyncio.get_running_loop())
        self.asked.set()
        if self.silent:
            await asyncio.sleep(3600)
        return Page([])

    async def close(self) -> None:
        pass


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()

    monkeypatch.setattr(ConnectedBroker, "_connect", lambda self, endpoint: wire)
    return wire


def made() -> SyncClient:
    return heapline.connect_sync("localhost:1", deadline=30)


def test_client_with_another_deadline_shares_the_clients_loop(wire: Wire) -> None:
    with made() as hl:
        quick = hl.within(2)
        quick.list_topics()
        hl.list_topics()
        quick.list_topics()
        assert [round(seconds) for _, seconds in wire.calls] == [2, 30, 2]
        assert len(wire.loops) == 1
    with pytest.raises(Closed):
        quick.list_topics()


def test_waiting_thread_raises_when_another_closes_the_client(wire: Wire) -> None:
    wire.silent = True
    hl = made()
    reported: list[Exception] = []

    def wait() -> None:
        try:
            hl.list_topics()
        except Exception as error:
            reported.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert wire.asked.wait(20)
    hl.close()
    waiting.join(20)
    assert [type(error) for error in reported] == [Closed]


def test_closed_client_can_be_entered_again(wire: Wire) -> None:
    hl = made()
    for _ in range(2):
        with hl:
            assert hl.list_topics() == []
        with pytest.raises(Closed):
            hl.list_topics()


def test_threads_can_use_and_close_one_client_concurrently(wire: Wire) -> None:
    for _ in range(20):
        hl, odd = made(), list[BaseException]()

        def use(hl: SyncClient = hl, odd: list[BaseException] = odd) -> None:
            try:
                for _ in range(5):
                    hl.list_topics()
                hl.close()
            except Closed:
                pass
            except BaseException as error:
                odd.append(error)

        threads = [threading.Thread(target=use, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert odd == []


def test_iteration_collected_in_the_clients_own_thread_does_not_wait_for_itself(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        async def __anext__(self) -> object:
            return object()

    monkeypatch.setattr("heapline.client.sync.Consumer", lambda *_: Endless())
    monkeypatch.setattr(ConnectedBroker, "adopt", lambda *_: None)
    ended = threading.Event()

    async def collect(held: list[Any]) -> None:
        held.clear()
        ended.set()

    with made() as hl:
        messages = [hl.consume("jobs")]
        next(messages[0])
        asking = threading.Thread(target=lambda: hl._run(collect(messages)), daemon=True)
        asking.start()
        assert ended.wait(20)
        asking.join(20)
        assert hl.list_topics() == []
