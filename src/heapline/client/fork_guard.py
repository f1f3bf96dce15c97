"""Protect forked processes: gRPC does not survive a fork, and a child that touches its parent's connections crashes.

If no client was used before the fork, clients work in the child. Otherwise each of them raises an error there.
"""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

from heapline.contract.errors import BadRequest


class Forgetful(Protocol):
    def forget(self) -> Any:
        """Remove and return the parent's objects in a forked child, without using or closing them."""
        ...


_CLIENTS: WeakSet[Forgetful] = WeakSet()
_LEFT_BEHIND: list[Any] = []  # forever: even garbage collection would call gRPC
_USED_BY: list[int] = []  # the process that has used gRPC


def watch(client: Forgetful) -> None:
    _CLIENTS.add(client)


def check_process() -> None:
    """Raise BadRequest if gRPC was used before this process was forked. Call it before gRPC is used."""
    if not _USED_BY:
        _USED_BY.append(os.getpid())
    elif _USED_BY[0] != os.getpid():
        raise BadRequest(
            "this process was forked from one that had already used a Heapline client, and gRPC does not survive "
            "that; use clients only after the fork (connect() alone does not connect), or start processes with "
            "'spawn'"
        )


def _in_child() -> None:
    _LEFT_BEHIND.extend(client.forget() for client in list(_CLIENTS))


os.register_at_fork(after_in_child=_in_child)
