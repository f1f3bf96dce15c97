"""Keys in a document that several servers share: which server sees a change, and when no caller is admitted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from heapline.contract.errors import CorruptionError, Unauthenticated, UnavailableError
from heapline.server.auth.guard import StoreGuard
from heapline.server.auth.passwords import AT_ONCE
from heapline.server.auth.secret import Secret
from heapline.server.auth.shared_store import STALE_SECONDS, Edit, SharedStore
from heapline.server.auth.store import AuthFile, decode
from heapline.testing.clock import FakeClock
from tests.unit.server.auth.rig import DIRECTORY, CountingHasher, new_disk


class Row:
    """The database row."""

    content: bytes | None = None
    is_away = False


class FakeDocument:
    """One server's view of the row, current as of its last read."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.content: bytes | None = row.content
        self.seconds = 0.0

    def age(self) -> float:
        return self.seconds

    async def read(self) -> None:
        self.read_blocking()

    def read_blocking(self) -> None:
        if self._row.is_away:
            raise UnavailableError("away")
        self.content = self._row.content

    def change_blocking(self, edit: Edit) -> None:
        self.read_blocking()
        after = edit(self._row.content)
        if after is not None:
            self.content = self._row.content = after


class Node:
    def __init__(self, row: Row) -> None:
        self.disk, self.document = new_disk(), FakeDocument(row)
        self.guard = StoreGuard(SharedStore(self.document, self.disk, DIRECTORY, FakeClock()), CountingHasher())

    def has_admin_key(self) -> bool:
        return self.disk.exists(f"{DIRECTORY}/admin.key")


@pytest.fixture
def row() -> Row:
    return Row()


def test_only_the_first_node_creates_the_admin_key(row: Row) -> None:
    nodes = [Node(row), Node(row)]
    assert [node.has_admin_key() for node in nodes] == [True, False]
    assert len(nodes[1].guard.store.file.keys) == 1


def test_nodes_derive_the_same_secrets(row: Row) -> None:
    assert Node(row).guard.secret("confirmation") == Node(row).guard.secret("confirmation")


async def test_key_of_another_node_is_known_immediately_and_revoked_on_read(row: Row) -> None:
    a, b = Node(row), Node(row)
    record, secret = a.guard.keys.create("worker", ["*:consume"])
    principal = await b.guard.authenticate(secret.reveal())
    a.guard.keys.revoke(record.id)
    assert b.guard.is_valid(principal)  # until the change arrives
    b.document.read_blocking()
    assert not b.guard.is_valid(principal)
    with pytest.raises(Unauthenticated):
        await b.guard.authenticate(secret.reveal())


async def test_known_key_is_accepted_for_a_limited_time_without_the_database(row: Row) -> None:
    node = Node(row)
    _, secret = node.guard.keys.create("worker", ["*:consume"])
    principal = await node.guard.authenticate(secret.reveal())
    row.is_away, node.document.seconds = True, STALE_SECONDS
    assert await node.guard.authenticate(secret.reveal()) == principal
    assert node.guard.is_valid(principal)
    node.document.seconds += 0.1
    with pytest.raises(UnavailableError, match="no key can be checked"):
        await node.guard.authenticate(secret.reveal())
    with pytest.raises(UnavailableError):
        node.guard.is_valid(principal)


async def test_new_key_cannot_be_checked_without_the_database(row: Row) -> None:
    a, b = Node(row), Node(row)
    _, secret = a.guard.keys.create("worker", ["*:consume"])
    row.is_away = True
    for _ in range(100):  # a verification that could not run is not counted as a failure
        with pytest.raises(UnavailableError):
            await b.guard.authenticate(secret.reveal())
    row.is_away = False
    await b.guard.authenticate(secret.reveal())


async def test_waiting_callers_are_refused_together_if_the_document_is_too_old(row: Row) -> None:
    node, answers = Node(row), asyncio.Semaphore(0)
    document = node.document
    tries = 0

    async def read() -> None:  # is slow and fails
        nonlocal tries
        tries += 1
        await answers.acquire()
        raise UnavailableError("no answer")

    document.read = read  # type: ignore[method-assign]
    keys = [f"hl_{number:016x}_{'x' * 43}" for number in range(50)]
    calls = [asyncio.create_task(node.guard.authenticate(key)) for key in keys]
    logins = [asyncio.create_task(node.guard.login("ada@example.org", Secret("x" * 12))) for _ in range(50)]
    await asyncio.sleep(0)
    document.seconds = STALE_SECONDS + 0.1
    for _ in range(2 * AT_ONCE):  # the callers that read
        answers.release()
    async with asyncio.timeout(10):
        refused = await asyncio.gather(*calls, *logins, return_exceptions=True)
    assert {type(error) for error in refused} == {UnavailableError}
    assert tries == 2 * AT_ONCE


@pytest.mark.parametrize("content", [None, b"{}", b"not JSON"])
def test_deleted_or_damaged_document_admits_no_caller(row: Row, content: bytes | None) -> None:
    node = Node(row)
    row.content = content
    with pytest.raises(CorruptionError, match="all requests are rejected"):
        node.guard.store.refresh(now=True)
    with pytest.raises(CorruptionError):
        node.guard.store.refresh()


async def test_deleted_document_is_not_created_again_by_a_running_server(row: Row) -> None:
    node = Node(row)
    _, secret = node.guard.keys.create("worker", ["*:consume"])
    await node.guard.authenticate(secret.reveal())
    row.content = None
    await node.guard.close()  # would write when the key was last used
    with pytest.raises(CorruptionError, match="was deleted"):
        node.guard.keys.create("other", ["*:consume"])
    assert row.content is None


def test_loading_in_two_threads_does_not_restore_a_revoked_key(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Node(row), Node(row)
    record, _ = a.guard.keys.create("worker", ["*:consume"])
    b.document.read_blocking()  # the state without the revocation
    a.guard.keys.revoke(record.id)
    store = b.guard.store

    def learn() -> None:
        b.document.read_blocking()
        store.refresh()

    learning = threading.Thread(target=learn)

    def decode_slowly(*args: Any) -> AuthFile:
        if not learning.ident:
            learning.start()
            learning.join(0.3)  # longer than a load takes, unless it waits for the state that is being loaded
        return decode(*args)

    monkeypatch.setattr("heapline.server.auth.shared_store.decode", decode_slowly)
    store.refresh()
    learning.join()
    assert store.key_principal(record.id) is None


async def test_close_does_not_wait_for_a_document_that_another_node_keeps_locked(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heapline.server.auth.guard.CLOSE_SECONDS", 0.05)
    node, unlocked = Node(row), threading.Event()
    _, secret = node.guard.keys.create("worker", ["*:consume"])
    await node.guard.authenticate(secret.reveal())

    def change_blocking(edit: Edit) -> None:
        unlocked.wait(30)

    monkeypatch.setattr(node.document, "change_blocking", change_blocking)
    try:
        async with asyncio.timeout(5):
            await node.guard.close()
    finally:
        unlocked.set()
