"""Confirmation tokens: a call that destroys data must be sent twice.

The first call is rejected with a token (`ConfirmationNeeded`); the same call with that token is executed. A token is
bound to the caller and to the encoded command, is valid for a minute and can be used once. It is an HMAC under the
server's secret, so nothing is stored for tokens that are never used, and every process with the secret can verify it.
Used tokens are remembered per process.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from heapline.clock import Clock
from heapline.contract.errors import ConfirmationNeeded
from heapline.server.auth.principals import Principal

VALID_FOR_MS = 60_000
_NONCE, _EXPIRY, _MAC = 16, 8, 32


class Confirmations:
    def __init__(self, clock: Clock, secret: bytes, valid_for_ms: int = VALID_FOR_MS) -> None:
        self._clock, self._secret, self._valid_for_ms = clock, secret, valid_for_ms
        self._used: dict[bytes, int] = {}  # nonce -> its expiry, in that order

    def require(self, token: str | None, principal: Principal, call: str, topic: str, command: bytes = b"") -> None:
        """Return if this call was confirmed, otherwise raise ConfirmationNeeded with a new token."""
        bound = _joined(principal.subject.encode(), call.encode(), topic.encode(), command)
        if not token or not self._redeem(token, bound):
            raise ConfirmationNeeded(call, topic, self._issue(bound))

    def _issue(self, bound: bytes) -> str:
        # Wall time, because other processes verify it too; a token from too far ahead is rejected.
        expiry = (self._clock.wall_ms() + self._valid_for_ms).to_bytes(_EXPIRY, "big")
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
        now = self._clock.wall_ms()
        nonce, expiry = open_part[:_NONCE], int.from_bytes(open_part[_NONCE:], "big")
        self._used = {used: until for used, until in self._used.items() if until > now}
        if not now < expiry <= now + self._valid_for_ms or nonce in self._used:
            return False
        self._used[nonce] = expiry
        return True

    def _mac(self, open_part: bytes, bound: bytes) -> bytes:
        return hmac.digest(self._secret, open_part + bound, hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """Join the parts, each with its length, so that no two different lists give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)
