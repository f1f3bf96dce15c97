"""Pull messages from one JetStream consumer in small batches without losing any.

The client's own `fetch` loses messages that have arrived when it is cancelled; the next holder then gets them only
after `ack_wait`. Here they stay in a queue, and `close` returns them to the caller.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from heapline.assign.cancellation import honor_cancellation
from heapline.assign.errors import ConnectionLost

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription


EXPIRES = 10.0  # seconds that a request waits at the server
GRACE = 2.0  # additional seconds before silence means that the request is lost
#: Statuses of a request that ended unfilled without an error: the server's 404 and 408.
EMPTY = ("404", "408")


class PullConsumer:
    """Requests messages of one consumer."""

    def __init__(self, client: Client, stream: str, consumer: str, batch: int) -> None:
        self._client, self._batch = client, batch
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._outstanding = 0  # messages that the server may still send for the last request

    async def open(self) -> None:
        async def on_message(message: Msg) -> None:
            self._arrived.put_nowait(message)

        self._subscription = await honor_cancellation(self._client.subscribe(self._inbox, cb=on_message))

    async def next(self) -> Msg:
        """Wait for the next message. Raise ConnectionLost if the consumer does not answer any more."""
        while True:
            if self._outstanding == 0 and self._arrived.empty():
                await self._request()
            try:
                async with asyncio.timeout(EXPIRES + GRACE):
                    message = await self._arrived.get()
            except TimeoutError:
                raise ConnectionLost("the consumer does not answer") from None
            if message.reply and not _status(message):
                self._outstanding = max(0, self._outstanding - 1)
                return message
            self._outstanding = 0
            if _status(message) not in EMPTY:
                raise ConnectionLost(f"the consumer ended with status {_status(message)}")

    async def _request(self) -> None:
        request = {"batch": self._batch, "expires": int(EXPIRES * 1e9)}
        await honor_cancellation(self._client.publish(self._subject, json.dumps(request).encode(), reply=self._inbox))
        self._outstanding = self._batch

    async def close(self) -> list[Msg]:
        """Stop requesting. Return the messages that arrived and were not handed out."""
        if self._subscription is not None and not self._client.is_closed:
            await self._subscription.unsubscribe()
        left = []
        while not self._arrived.empty():
            message = self._arrived.get_nowait()
            if message.reply and not _status(message):
                left.append(message)
        return left


def _status(message: Msg) -> str:
    return (message.headers or {}).get("Status", "")
