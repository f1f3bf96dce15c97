"""HTTP on one connection, as uvicorn has it, with bounds on the head of a request, which it has not.

Bodies are bounded by the door, when it is known who sends them. A head is whatever comes before that: anybody's. It may
be so large and take so long, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 << 10
HEAD_SECONDS_MAX = 30.0
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    _head_bytes = 0  # that came of a head that is not complete
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self.transport.write(TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._head_timer is None:
            self._watch_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _watch_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS_MAX, self.transport.close)

    def _end_head(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
