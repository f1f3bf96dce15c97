"""A Django project in one file that enqueues tasks in its transactions: `python examples/django_outbox.py`.

There are two ways. `transaction.on_commit` enqueues after the commit: it is fast and simple, but a process that dies
between the two loses the message. The outbox writes the message in the transaction itself and loses nothing. In
production the relay is `manage.py heapline_relay` and the worker is `heapline worker …`, both connected to a server.
Here everything runs in one process, and the queue is a directory.
"""

import asyncio
import os

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["heapline.outbox.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connections, transaction  # noqa: E402

import heapline  # noqa: E402
from heapline.outbox import OutboxRelay  # noqa: E402
from heapline.outbox.django import DjangoStore, enqueue_call  # noqa: E402

app = heapline.App(os.environ.get("HEAPLINE_URL", "./data"))


@app.task(topic="mail", priority=5)
async def thank(item: str) -> None:
    print(f"thanks for the {item}")


@app.task(topic="mail", priority=1)
async def bill(item: str) -> None:
    print(f"bill for the {item}")


def order_with_on_commit(item: str) -> None:
    with transaction.atomic():
        # … save the order …
        transaction.on_commit(lambda: thank.enqueue_sync(item))


def order_with_outbox(item: str, *, is_paid: bool = True) -> None:
    with transaction.atomic():
        # … save the order …
        enqueue_call(bill.item(item))
        if not is_paid:
            raise ValueError("not paid")


async def relay_and_work() -> None:
    async with app:
        async with OutboxRelay(DjangoStore(), await app.broker()) as relay:
            print("relayed:", await relay.run_once())
        worker = app.worker(concurrency=1)
        running = asyncio.create_task(worker.run())
        while worker.totals.done < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        worker.stop()
        await running


def main() -> None:
    call_command("migrate", verbosity=0)
    order_with_on_commit("tea")
    order_with_outbox("tea")
    try:
        order_with_outbox("yacht", is_paid=False)
    except ValueError as error:
        print(error)
    asyncio.run(relay_and_work())
    connections.close_all()


if __name__ == "__main__":
    main()
