"""Keep secrets out of logs: a wrapper that does not print its text, and a filter for text from elsewhere.

An API key is `hl_<id>_<secret>`. The id is public and may appear in logs; the secret is 256 random bits. The prefix
`hl_` makes a leaked key easy to find, and the id is all that is needed to revoke it.
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
    """Text that `repr` and `str` do not show."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a secret cannot be pickled")


def new_key() -> tuple[str, Secret]:
    """Return a new id and the complete key."""
    key_id = secrets.token_hex(8)
    return key_id, Secret(f"hl_{key_id}_{secrets.token_urlsafe(32)}")


def redact(text: str) -> str:
    """Replace everything that looks like a credential, for audit lines and logs.

    >>> redact("Bearer abc, then hl_00112233_xyz")
    'Bearer […] then hl_00112233_[…]'
    """
    text = _PEM_IN_TEXT.sub("[private key]", text)
    text = _KEY_IN_TEXT.sub(r"hl_\1_[…]", text)
    text = _TOKEN_IN_TEXT.sub("[token]", text)
    return _CREDENTIAL_IN_TEXT.sub(lambda m: m.group() if m.group().endswith("_[…]") else f"{m[1]} […]", text)
