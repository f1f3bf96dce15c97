"""Confirmation tokens: what cannot be undone is asked for twice.

The first call is refused with a token (`ConfirmationNeeded`), the same call with that token is carried out. A token is
bound to who asks, to the call, its topic and its other arguments, is good for a minute and for one use. It is an HMAC
under a secret of this process, so nothing is kept for tokens that are never used, and a restart ends all of them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from heapline.clock import Clock
from heapline.errors import ConfirmationNeeded
from heapline.server.auth.principal import Principal

GOOD_FOR_MS = 60_000
_NONCE, _EXPIRY, _MAC = 16, 8, 32


class Confirmations:
    def __init__(self, clock: Clock, good_for_ms: int = GOOD_FOR_MS) -> None:
        self._clock, self._good_for_ms = clock, good_for_ms
        self._secret = secrets.token_bytes(32)
        self._used: dict[bytes, int] = {}  # nonce -> when it would have run out; in that order

    def require(self, token: str | None, principal: Principal, call: str, topic: str, arguments: str = "") -> None:
        """Returns if this very call was confirmed, else raises ConfirmationNeeded with a fresh token."""
        bound = _bound(principal.subject, call, topic, arguments)
        if not token or not self._redeem(token, bound):
            raise ConfirmationNeeded(call, topic, self._issue(bound))

    def _issue(self, bound: bytes) -> str:
        # Boot time: it neither jumps nor outlives the process's secret.
        expiry = (self._clock.boot_ms() + self._good_for_ms).to_bytes(_EXPIRY, "big")
        open_part = secrets.token_bytes(_NONCE) + expiry
        return base64.urlsafe_b64encode(open_part + self._mac(open_part, bound)).decode()

    def _redeem(self, token: str, bound: bytes) -> bool:
        try:
            raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return False
        if len(raw) != _NONCE + _EXPIRY + _MAC:
            return False
        open_part, mac = raw[:-_MAC], raw[-_MAC:]
        if not hmac.compare_digest(mac, self._mac(open_part, bound)):
            return False
        now = self._clock.boot_ms()
        nonce, expiry = open_part[:_NONCE], int.from_bytes(open_part[_NONCE:], "big")
        self._used = {used: until for used, until in self._used.items() if until > now}
        if expiry <= now or nonce in self._used:
            return False
        self._used[nonce] = expiry
        return True

    def _mac(self, open_part: bytes, bound: bytes) -> bytes:
        return hmac.digest(self._secret, open_part + bound, hashlib.sha256)


def _bound(*parts: str) -> bytes:
    """Each with its length, so that no two different lists read alike."""
    return b"".join(len(raw).to_bytes(4, "big") + raw for raw in (part.encode() for part in parts))
