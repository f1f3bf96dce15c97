"""The outbox as a Django app: "heapline.outbox.django" in INSTALLED_APPS, and `enqueue` in a transaction.

The app itself is heapline.client.outbox.django, which may stand in INSTALLED_APPS just as well: apps.py here names it,
so that tables, migrations and models are the same ones by either name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heapline.client.outbox.django import enqueue, enqueue_call

if TYPE_CHECKING:
    from heapline.client.outbox.django.store import DjangoStore

__all__ = ["DjangoStore", "enqueue", "enqueue_call"]


def __getattr__(name: str) -> Any:
    if name == "DjangoStore":
        from heapline.client.outbox.django.store import DjangoStore

        return DjangoStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
