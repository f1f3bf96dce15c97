"""The common part of both sides of a connection: bytes in and out, PING, and the end after a violation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heapline.wire.frames import compression
from heapline.wire.frames.buffers import TAKE_BYTES, FrameReader, FrameWriter
from heapline.wire.frames.compression import Compression
from heapline.wire.frames.events import Event, GoAway
from heapline.wire.frames.format import (
    COMPRESS_MAX,
    COMPRESS_MIN,
    COMPRESSED,
    GOAWAY,
    PING,
    PONG,
    Body,
    Headers,
    Notice,
    ProtocolError,
    Windows,
    decode_body,
    encode,
    name_of,
)

SILENCE_SECONDS = 15.0  # without received bytes, until PING; and after PING, until the connection counts as dead
TICK_SECONDS = 5.0  # the longest time between ticks

#: Takes the command, request, headers and body of a frame.
Handler = Callable[[int, int, Headers | None, Body], Event | None]


class Peer:
    """One side of a connection. `ServerFrames` and `ClientFrames` add the frames that only one side receives."""

    def __init__(self, compressions: Mapping[str, Compression] | None) -> None:
        self.failure: str | None = None  # why nothing more is accepted
        self._compressions = compression.installed() if compressions is None else compressions
        self._compression: Compression | None = None
        self._reader, self._writer = FrameReader(), FrameWriter()
        self._open: dict[int, int] = {}  # requests that were not answered, with the sizes of their bodies
        self._open_bytes = 0
        self._waiting: set[int] = set()  # those of them that may wait
        self._waiting_commands: frozenset[int] = frozenset()
        self._credits: dict[int, int] = {}  # items that feeds may still send
        self._heard = True
        self._silent_since = self._pinged_at = 0.0
        self._is_pinged = False
        self._peer_windows = Windows()
        self._handlers: dict[int, Handler] = {PING: self._on_ping, PONG: self._on_pong, GOAWAY: self._on_goaway}

    # -- for the owner -----------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Any]:
        """Return the events that the received bytes complete."""
        if self.failure is not None:
            raise ProtocolError(self.failure)
        self._heard = True
        events: list[Any] = []
        reader = self._reader
        try:
            for kind, command, request, headers, body in reader.receive(data):
                handler = self._handlers.get(kind)
                if handler is None:
                    raise ProtocolError(f"{name_of(kind)} is not expected here")
                event = handler(command, request, headers, body)
                if event is not None:
                    events.append(event)
            if reader.violation is not None:
                raise reader.violation
        except ProtocolError as violation:
            violation.events = events
            raise self._fail(violation) from None
        return events

    def take(self, size: int = TAKE_BYTES) -> list[Body]:
        """Return buffers to write now, in order; about `size` bytes. Call it until it returns nothing."""
        return self._writer.take(size)

    @property
    def buffered(self) -> int:
        """Bytes that `take` has not returned yet. Stop reading while they are many: the peer does not read."""
        return self._writer.buffered

    def may_compress(self, size: int) -> bool:
        """Return whether the sides agreed on compression, and a body of this size is worth it."""
        return COMPRESS_MIN < size <= COMPRESS_MAX and self._compression is not None

    @property
    def place(self) -> int:
        """The queue position of the frame that was sent last, for `is_queued`."""
        return self._writer.place

    def is_queued(self, request: int, place: int) -> bool:
        """Return whether `take` has not returned all of an answer. `place` is its position when it was sent."""
        return self._writer.is_queued(request, place)

    def note_alive(self) -> None:
        """Count the peer as alive, because it reads; for a side that does not read at present."""
        self._heard = True

    @property
    def in_progress(self) -> int:
        """Requests without an answer, without those of commands that may wait."""
        return len(self._open) - len(self._waiting)

    @property
    def waiting(self) -> int:
        """Requests without an answer, of commands that may wait."""
        return len(self._waiting)

    @property
    def incomplete(self) -> int:
        """Bytes received of frames and bodies that are not complete."""
        return self._reader.buffered

    def is_open(self, request: int) -> bool:
        """Return whether a request was not answered. Events of one `receive` may follow the answer to the first."""
        return request in self._open

    def credits(self, request: int) -> int:
        """Return how many items a feed may still send."""
        return self._credits.get(request, 0)

    def tick(self, now: float) -> float:
        """Send PING after 15 s of silence. Return when to call this again. Raise ProtocolError if the peer is dead.

        `now` is in seconds of any clock that only increases.
        """
        self._check_usable()
        if self._heard:
            self._heard = self._is_pinged = False
            self._silent_since = now
        if not self._is_pinged:
            if now - self._silent_since < SILENCE_SECONDS:
                return min(now + TICK_SECONDS, self._silent_since + SILENCE_SECONDS)
            self._is_pinged, self._pinged_at = True, now
            self._writer.put_first(PING, 0)
        elif now - self._pinged_at >= SILENCE_SECONDS:
            raise self._fail(ProtocolError(f"the peer has not answered PING for {SILENCE_SECONDS:g} s"))
        return min(now + TICK_SECONDS, self._pinged_at + SILENCE_SECONDS)

    def send_goaway(self, text: str, code: str = "UNAVAILABLE") -> None:
        """Announce that this side will close the connection once the requests in progress are answered."""
        self._check_usable()
        self._writer.put_first(GOAWAY, 0, encode(Notice(code, text[:1000])))

    # -- for both sides ------------------------------------------------------------------------------------------------

    def _fail(self, violation: ProtocolError) -> ProtocolError:
        self.failure = str(violation)
        self._reader.clear()
        self._writer.clear_large()
        self._writer.put_first(GOAWAY, 0, encode(Notice("INVALID_ARGUMENT", str(violation)[:1000])))
        return violation

    def _check_usable(self) -> None:
        if self.failure is not None:
            raise ProtocolError(self.failure)

    def _agree(self, features: list[str]) -> list[str]:
        """Use the first compression that both sides have."""
        agreed = [name for name in features if name in self._compressions][:1]
        self._compression = self._compressions[agreed[0]] if agreed else None
        return agreed

    def _close(self, request: int) -> bool:
        """Forget a request, because it is answered. Return whether it was open."""
        size = self._open.pop(request, None)
        if size is None:
            return False
        self._open_bytes -= size
        if self._waiting:
            self._waiting.discard(request)
        if self._credits:
            self._credits.pop(request, None)
        return True

    def _compressed(self, body: Body) -> tuple[Body, int]:
        """Return a body as it travels, and its flags."""
        if self.may_compress(len(body)):
            assert self._compression is not None
            smaller = self._compression.compress(body)
            if len(smaller) < len(body):
                return smaller, COMPRESSED
        return body, 0

    def _on_ping(self, command: int, request: int, headers: Headers | None, body: Body) -> None:
        self._writer.put_first(PONG, request)

    def _on_pong(self, command: int, request: int, headers: Headers | None, body: Body) -> None:
        pass  # any received byte shows that the peer lives

    def _on_goaway(self, command: int, request: int, headers: Headers | None, body: Body) -> Event | None:
        notice: Notice = decode_body(body, Notice, "GOAWAY")
        return GoAway(notice.code, notice.text)
