"""The outbox as a Django app: put "heapline.outbox.django" into INSTALLED_APPS, migrate, and

    from heapline.outbox.django import enqueue

    with transaction.atomic():
        order.save()
        enqueue("bills", payload, priority=5)

`manage.py heapline_relay --to localhost:7400` brings what was committed to the broker. Nothing of Django is imported
before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from heapline.client.outbox.rows import fields_of, new_row

if TYPE_CHECKING:
    from heapline.client.outbox.django.store import DjangoStore
    from heapline.client.tasks.task import Item

__all__ = ["DjangoStore", "enqueue", "enqueue_call"]


def enqueue(
    topic: str,
    payload: bytes,
    *,
    using: str | None = None,
    priority: int = 0,
    key: str | None = None,
    delay: float | None = None,
    deliver_at: datetime | None = None,
    headers: Mapping[str, str] | None = None,
    ttl: float | None = None,
    max_retries: int | None = None,
    fairness_key: str | None = None,
) -> int:
    """Write a message in the transaction that is open on this database, and return its row's id.

    `using` names the database if it is not the default one: the one that the rest of the transaction is on. A `delay`
    counts from now, a `ttl` from when the relay brings it.
    """
    from heapline.client.outbox.django.models import OutboxMessage

    row = new_row(
        topic,
        payload,
        priority=priority,
        key=key,
        delay=delay,
        deliver_at=deliver_at,
        headers=headers,
        ttl=ttl,
        max_retries=max_retries,
        fairness_key=fairness_key,
    )
    return int(OutboxMessage.objects.using(using).create(**row).pk)


def enqueue_call(call: Item, *, using: str | None = None) -> int:
    """The same for a call of a task: `enqueue_call(send.item(order, priority=5))`."""
    return enqueue(**fields_of(call), using=using)


def __getattr__(name: str) -> Any:
    if name == "DjangoStore":
        from heapline.client.outbox.django.store import DjangoStore

        return DjangoStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
