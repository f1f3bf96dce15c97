"""The messages of one JetStream consumer, asked for in small portions, none of which is ever forgotten.

The client's own `fetch` loses what has arrived when it is cancelled: such messages come to the next holder only after
`ack_wait`. Here they stay in a queue, and `close` hands them back. Decides nothing about who may have them.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from heapline.assign.errors import ConnectionLost
from heapline.assign.heeding import heeding

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

EXPIRES = 10.0  # seconds that one request waits at the server
GRACE = 2.0  # seconds more until silence means that the request is lost
#: A request that ended without being filled, with nothing wrong: the server's 404, 408, and 409 for one that moved.
EMPTY = ("404", "408")


class Pull:
    def __init__(self, client: Client, stream: str, consumer: str, batch: int) -> None:
        self._client, self._batch = client, batch
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._owed = 0  # messages that the server may still send for the last request

    async def open(self) -> None:
        async def hear(message: Msg) -> None:
            self._arrived.put_nowait(message)

        self._subscription = await heeding(self._client.subscribe(self._inbox, cb=hear))

    async def next(self) -> Msg:
        """The next message, however long that takes. ConnectionLost if nobody answers for the consumer any more."""
        while True:
            if self._owed == 0 and self._arrived.empty():
                await self._request()
            try:
                async with asyncio.timeout(EXPIRES + GRACE):
                    message = await self._arrived.get()
            except TimeoutError:
                raise ConnectionLost("a consumer does not answer") from None
            if message.reply and not _status(message):
                self._owed = max(0, self._owed - 1)
                return message
            self._owed = 0
            if _status(message) not in EMPTY:
                raise ConnectionLost(f"a consumer has ended: {_status(message)}")

    async def _request(self) -> None:
        request = {"batch": self._batch, "expires": int(EXPIRES * 1e9)}
        await heeding(self._client.publish(self._subject, json.dumps(request).encode(), reply=self._inbox))
        self._owed = self._batch

    async def close(self) -> list[Msg]:
        """Ask for no more; what has arrived and was not handed out."""
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
