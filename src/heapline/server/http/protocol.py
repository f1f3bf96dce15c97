"""HTTP on one connection, as uvicorn has it, with bounds on the head of a request, which it has not.

Bodies are bounded by the door, when it is known who sends them. A head is whatever comes before that: anybody's. It may
be so large and take so long, and then the connection is closed. The same bound holds for whatever else is no body:
what stands beside the sizes of chunks, and the fields behind the last, which are dropped: uvicorn would add them to the
headers of a request that was judged by its headers already.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 << 10
HEAD_SECONDS_MAX = 30.0
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    _bytes = 0  # that came since there last was a body, or the end of a head or a request
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self._bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            if self._in_head:
                self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._head_timer is None:
            self._watch_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _watch_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS_MAX, self.transport.close)

    def _end_head(self) -> None:
        self._in_head, self._bytes = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
