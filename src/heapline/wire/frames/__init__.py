"""The native protocol without I/O: a server's and a client's side of one connection.

An owner passes received bytes to `receive`, which returns events, and writes the buffers that `take` returns. The
object reads no clock and no socket: the asyncio server and client, the blocking client, the simulator and the fuzzer
use the same one. It keeps the promises of docs/wire.md: request numbers, windows, credits, one answer per request,
answers to PING. It does not know commands or results; `wire/codec.py` encodes their bodies.

A violation by the peer raises `ProtocolError`. After it the object accepts nothing more, and `take` returns what is to
be sent last: GOAWAY with the reason. Misuse by the owner raises RuntimeError.

>>> client, server = ClientFrames("a key"), ServerFrames()
>>> server.receive(b"".join(client.take()))[0].credential
'a key'
>>> server.send_welcome()
>>> client.receive(b"".join(server.take()))[0].version
1
>>> client.send_request(0x09, b"body")
1
>>> server.receive(b"".join(client.take()))
[Request(request=1, command=9, headers=None, body=b'body')]
>>> server.send_response(1, b"result")
>>> client.receive(b"".join(server.take()))
[Response(request=1, body=b'result')]
"""

from heapline.wire.frames.client import ClientFrames
from heapline.wire.frames.events import Auth, Cancel, Credit, End, Error, Event, GoAway, Item, Request, Response
from heapline.wire.frames.format import ALPN, Body, Headers, Hello, ProtocolError, Welcome, Windows
from heapline.wire.frames.server import ServerFrames

__all__ = [
    "ClientFrames", "ServerFrames", "ProtocolError", "Windows", "Headers", "Body", "ALPN",
    "Event", "Hello", "Welcome", "Request", "Response", "Error", "Item", "End", "Credit", "Cancel", "Auth", "GoAway",
]  # fmt: skip
