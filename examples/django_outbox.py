"""A Django project in one file that writes messages in its transactions: `python examples/django_outbox.py`.

Two ways. `transaction.on_commit` enqueues after the commit: quick and simple, but a process that dies right between the
two loses the message. The outbox writes the message in the transaction itself and loses nothing; `on_commit` then only
tells the relay to look at once. In real life the relay is `manage.py heapline_relay` in a process of its own.
"""

import asyncio

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["heapline.client.outbox.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connections, transaction  # noqa: E402

import heapline  # noqa: E402
from heapline.client.outbox import OutboxRelay  # noqa: E402
from heapline.client.outbox.django import DjangoStore, enqueue  # noqa: E402
from heapline.engine import SyncBroker  # noqa: E402


def order_with_on_commit(item: str, hl: SyncBroker) -> None:
    with transaction.atomic():
        # … save the order …
        transaction.on_commit(lambda: hl.enqueue("mail", f"thanks for the {item}".encode()))


def order_with_outbox(item: str, *, is_paid: bool = True) -> None:
    with transaction.atomic():
        # … save the order …
        enqueue("bills", f"bill for the {item}".encode(), priority=1)
        if not is_paid:
            raise ValueError("not paid")


async def relay() -> int:
    async with heapline.open("data") as hl, OutboxRelay(DjangoStore(), hl) as outbox:
        return await outbox.run_once()


def main() -> None:
    call_command("migrate", verbosity=0)
    with heapline.open_sync("data") as hl:
        hl.create_topic("mail")
        hl.create_topic("bills")
        order_with_on_commit("tea", hl)
        print(hl.pop("mail")[0].payload.decode())
    order_with_outbox("tea")
    try:
        order_with_outbox("yacht", is_paid=False)
    except ValueError as error:
        print(error)
    print("relayed:", asyncio.run(relay()))
    with heapline.open_sync("data") as hl:
        for m in hl.pop("bills", 10):
            print(m.payload.decode())
            m.ack()
    connections.close_all()


if __name__ == "__main__":
    main()
