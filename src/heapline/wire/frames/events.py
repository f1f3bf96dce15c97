"""Events that `receive` returns. `Hello` and `Welcome` (format.py) are events too.

A body is bytes, or a read-only view if it is large.
"""

from __future__ import annotations

from msgspec import Struct

from heapline.contract.errors import HeaplineError
from heapline.wire import codec
from heapline.wire.frames.format import Body, Headers, Hello, Welcome


class Request(Struct, frozen=True, gc=False):
    request: int
    command: int
    headers: Headers | None
    body: Body


class Response(Struct, frozen=True, gc=False):
    request: int
    body: Body


class Error(Struct, frozen=True, gc=False):
    request: int  # 0: the server refused Hello
    body: Body

    @property
    def error(self) -> HeaplineError:
        """The exception that the body describes."""
        return codec.decode_error(self.body)


class Item(Struct, frozen=True, gc=False):
    request: int
    body: Body
    credits: int  # that the item used


class End(Struct, frozen=True, gc=False):
    request: int


class Credit(Struct, frozen=True, gc=False):
    request: int
    items: int


class Cancel(Struct, frozen=True, gc=False):
    request: int


class Auth(Struct, frozen=True, gc=False):
    request: int
    credential: str

    def __repr__(self) -> str:
        """Return a text without the credential."""
        return f"Auth(request={self.request})"


class GoAway(Struct, frozen=True, gc=False):
    code: str
    text: str


Event = Hello | Welcome | Request | Response | Error | Item | End | Credit | Cancel | Auth | GoAway
