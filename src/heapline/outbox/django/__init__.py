"""The outbox as a Django app: put "heapline.outbox.django" into INSTALLED_APPS, migrate, and

    from heapline.outbox.django import enqueue

    with transaction.atomic():
        order.save()
        enqueue("bills", payload, priority=5)

`manage.py heapline_relay --to localhost:7400` brings what was committed to the broker. Nothing of Django is imported
before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from heapline.outbox.store import RowOptions, fields_of, new_row

if TYPE_CHECKING:
    from heapline.client.tasks.task import Item
    from heapline.outbox.django.store import DjangoStore

__all__ = ["DjangoStore", "enqueue", "enqueue_call"]


def enqueue(topic: str, payload: bytes, *, using: str | None = None, **options: Unpack[RowOptions]) -> int:
    """Write a message in the transaction that is open on this database, and return its row's id.

    `using` names the database if it is not the default one: the one that the rest of the transaction is on. A `delay`
    counts from now, a `ttl` from when the relay brings it.
    """
    from heapline.outbox.django.models import OutboxMessage

    row = new_row(topic, payload, **options)
    return int(OutboxMessage.objects.using(using).create(**row).pk)


def enqueue_call(call: Item, *, using: str | None = None) -> int:
    """Enqueue a call of a task: `enqueue_call(send.item(order, priority=5))`."""
    return enqueue(**fields_of(call), using=using)


def __getattr__(name: str) -> Any:
    if name == "DjangoStore":
        from heapline.outbox.django.store import DjangoStore

        return DjangoStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
