"""Forks: gRPC does not survive one, so a child that would touch its parent's connections crashes without a word.

A client that nobody has used yet is good in the child, if no other was either. Else each one there says what to do.
"""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

from heapline.errors import BadRequest


class Forgetful(Protocol):
    def forget(self) -> Any:
        """In a forked child: let go of what is the parent's, and return it. It is neither used nor closed here."""
        ...


_CLIENTS: WeakSet[Forgetful] = WeakSet()
_LEFT_BEHIND: list[Any] = []  # for ever: even to collect it would reach into gRPC
_USED_BY: list[int] = []  # the process that has used gRPC


def watch(client: Forgetful) -> None:
    _CLIENTS.add(client)


def check_process() -> None:
    """gRPC is about to be used."""
    if not _USED_BY:
        _USED_BY.append(os.getpid())
    elif _USED_BY[0] != os.getpid():
        raise BadRequest(
            "this process was forked from one that had already used a Heapline client, and gRPC does not survive "
            "that: use clients only after the fork (connect() alone does not connect), or start processes with "
            "'spawn'"
        )


def _in_child() -> None:
    _LEFT_BEHIND.extend(client.forget() for client in list(_CLIENTS))


os.register_at_fork(after_in_child=_in_child)
