"""A server of the native protocol on real sockets, with a script instead of a broker."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from heapline.contract.call import CALLS
from heapline.contract.errors import TopicNotFound, Unauthenticated
from heapline.contract.topics import GetTopic
from heapline.wire import codec
from heapline.wire.frames import Auth, Cancel, Credit, Hello, ProtocolError, Request, ServerFrames, Windows

Script = Mapping[type, Callable[[ServerFrames, int, Any], None]]
KEYS = {"good", "better"}


def not_found(frames: ServerFrames, number: int, command: GetTopic) -> None:
    frames.send_error(number, codec.encode_error(TopicNotFound(command.topic)))


class FakeServer:
    """Use it with `with`. `events` are those of all connections."""

    def __init__(
        self,
        script: Script,
        path: Path | None = None,
        tls: ssl.SSLContext | None = None,
        windows: Windows | None = None,
        on_cancel: Callable[[ServerFrames, int], None] | None = None,
        on_credit: Callable[[ServerFrames, int], None] | None = None,
    ) -> None:
        self._script, self._tls, self._windows = {GetTopic: not_found, **script}, tls, windows
        self._on_cancel, self._on_credit = on_cancel, on_credit
        self.events: list[Any] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
        self._listener.bind(("127.0.0.1", 0) if path is None else str(path))
        self._listener.listen()
        self.address: Any = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> FakeServer:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self.connections):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def seen(self, kind: type) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections.append(sock)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError):
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                self.connections.append(sock)
            frames = ServerFrames(self._windows, waiting_commands=codec.waiting_commands(), server="fake")
            while data := sock.recv(1 << 16):
                try:
                    for event in frames.receive(data):
                        self.events.append(event)
                        self._handle(frames, event)
                except ProtocolError as error:
                    self.events.append(error)
                while buffers := frames.take():
                    sock.sendall(b"".join(buffers))
                if frames.failure is not None:
                    break
            sock.close()

    def _handle(self, frames: ServerFrames, event: Any) -> None:
        match event:
            case Hello(credential=key):
                if key in KEYS:
                    frames.send_welcome()
                else:
                    frames.send_error(0, codec.encode_error(Unauthenticated(f"unknown key {key!r}")))
            case Request(number, command, _, body):
                kind = CALLS[command]
                self._script[kind](frames, number, codec.decode_call(bytes(body), kind))
            case Auth(number, key):
                if key in KEYS:
                    frames.send_response(number)
                else:
                    frames.send_error(number, codec.encode_error(Unauthenticated(f"unknown key {key!r}")))
            case Cancel(number) if self._on_cancel is not None and frames.is_open(number):
                self._on_cancel(frames, number)
            case Credit(number) if self._on_credit is not None and frames.is_open(number):
                self._on_credit(frames, number)
