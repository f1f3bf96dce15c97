"""Keeping secrets out of sight: a wrapper that does not print, and a filter for text that somebody else wrote.

An API key is `hl_<id>_<secret>`: the id is public and may stand in logs, the secret is 256 random bits. Whoever sees
`hl_` in a file knows what was leaked, and can revoke it by its id.
"""

from __future__ import annotations

import re
import secrets

KEY = re.compile(r"hl_([0-9a-f]{16})_([A-Za-z0-9_-]{43})\Z")
_KEY_IN_TEXT = re.compile(r"hl_([0-9A-Za-z]{1,16})_[A-Za-z0-9_-]+")
_TOKEN_IN_TEXT = re.compile(r"eyJ[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)*")
_CREDENTIAL_IN_TEXT = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_PEM_IN_TEXT = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


class Secret:
    """Text that shows itself only when asked by name."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a secret is not pickled")


def new_key() -> tuple[str, Secret]:
    """A fresh id, and the whole key."""
    key_id = secrets.token_hex(8)
    return key_id, Secret(f"hl_{key_id}_{secrets.token_urlsafe(32)}")


def redact(text: str) -> str:
    """Take out whatever looks like a credential of ours: for audit lines and logs.

    >>> redact("Bearer abc, then hl_00112233_xyz")
    'Bearer […] then hl_00112233_[…]'
    """
    text = _PEM_IN_TEXT.sub("[private key]", text)
    text = _KEY_IN_TEXT.sub(r"hl_\1_[…]", text)
    text = _TOKEN_IN_TEXT.sub("[token]", text)
    return _CREDENTIAL_IN_TEXT.sub(lambda m: m.group() if m.group().endswith("_[…]") else f"{m[1]} […]", text)
