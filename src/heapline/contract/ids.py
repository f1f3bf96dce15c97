"""The two forms of a message id: the integer, unique within its topic, and the ULID, unique everywhere.

    integer: ms since 2024-01-01T00:00:00Z (41 bits) | partition (10) | sequence (12)
    ULID:    48 bits of Unix milliseconds | partition (10) | sequence (12) | the topic's id suffix (58)

ULID tools read the right time, and the ULIDs of a topic sort as its integers do. A topic's id suffix is a random number
that is drawn when the topic is created and kept in the catalog (engine/catalog.py). How integers are assigned is
decided in core/ids.py.
"""

from __future__ import annotations

from functools import lru_cache

from heapline.contract.errors import BadRequest

EPOCH_2024_MS = 1_704_067_200_000
MS_BITS, PARTITION_BITS, SEQUENCE_BITS = 41, 10, 12
SUFFIX_BITS = 58
SUFFIX_MAX = (1 << SUFFIX_BITS) - 1
ID_MAX = (1 << 63) - 1

_SEQUENCES = 1 << SEQUENCE_BITS
_MS_SHIFT = PARTITION_BITS + SEQUENCE_BITS
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Both cases by table: str.upper() would also accept letters such as U+017F.
_DIGIT = {ch: n for n, up in enumerate(_ALPHABET) for ch in (up, up.lower())}
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_ULID_CHARS = 26
#: The upper ten bits of each sequence number as two characters.
_HEADS = [_PAIRS[s >> 2] for s in range(_SEQUENCES)]
_INTEGER_DIGITS_MAX = 19


def to_ulid(message_id: int, suffix: int) -> str:
    return to_ulids([message_id], suffix)[0]


def shown_ids(message_ids: list[int], suffix: int) -> list[str]:
    """Return the first ids as people read them: ULIDs, or digits if the topic's suffix is not known (0)."""
    return to_ulids(message_ids[:3], suffix) if suffix else [str(id) for id in message_ids[:3]]


@lru_cache(1024)
def tails_of(suffix: int) -> tuple[str, ...]:
    """Return a ULID's last 12 characters for each value of the sequence's lowest two bits."""
    if not 0 <= suffix <= SUFFIX_MAX:
        raise ValueError(f"{suffix} is not an id suffix; it must be a number of {SUFFIX_BITS} bits")
    rest = "".join(_ALPHABET[suffix >> 5 * at & 31] for at in reversed(range(11)))
    return tuple(_ALPHABET[low << 3 | suffix >> 55] + rest for low in range(4))


def to_ulids(message_ids: list[int], suffix: int) -> list[str]:
    """Return the ULIDs of ids of one topic. Sorted batches are the cheap case: ids near in time share their prefix."""
    out: list[str] = []
    hour, hour_chars, prefix_of, prefix = -1, "", -1, ""
    tails = tails_of(suffix)
    for message_id in message_ids:
        if message_id >> SEQUENCE_BITS != prefix_of:
            if not 0 <= message_id <= ID_MAX:
                raise BadRequest(f"{message_id} is not a message id; it must be between 0 and 2^63-1")
            prefix_of = message_id >> SEQUENCE_BITS
            ms = (message_id >> _MS_SHIFT) + EPOCH_2024_MS
            if ms >> 20 != hour:
                hour = ms >> 20
                hour_chars = _PAIRS[hour >> 20] + _PAIRS[(hour >> 10) & 1023] + _PAIRS[hour & 1023]
            prefix = hour_chars + _PAIRS[(ms >> 10) & 1023] + _PAIRS[ms & 1023] + _PAIRS[prefix_of & 1023]
        out.append(f"{prefix}{_HEADS[message_id & 4095]}{tails[message_id & 3]}")
    return out


def from_ulid(text: str) -> tuple[int, int]:
    """Return the id and the id suffix of a ULID. Reject a ULID that no topic can have, in upper or lower case."""
    if len(text) != _ULID_CHARS:
        raise BadRequest(f"{text[:40]!r} is not a message id; a ULID has {_ULID_CHARS} characters")
    value = 0
    for ch in text:
        digit = _DIGIT.get(ch)
        if digit is None:
            raise BadRequest(f"{text!r} is not a message id; {ch!r} is not a ULID character")
        value = value << 5 | digit
    ms = (value >> 80) - EPOCH_2024_MS
    if not 0 <= ms < 1 << MS_BITS:
        raise BadRequest(f"{text!r} is not a message id; a message id's time is between 2024 and 2093")
    return ms << _MS_SHIFT | value >> SUFFIX_BITS & (1 << _MS_SHIFT) - 1, value & SUFFIX_MAX


def parse_id(value: object) -> tuple[int, int | None]:
    """Return the id and, if it was given as a ULID, the id suffix.

    Accept an integer, its decimal digits, or a ULID.
    """
    if isinstance(value, str):
        if len(value) == _ULID_CHARS:
            return from_ulid(value)
        if not (value.isascii() and value.isdigit() and len(value) <= _INTEGER_DIGITS_MAX):
            raise BadRequest(f"{value[:40]!r} is not a message id; use the integer or the ULID that enqueue returned")
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= ID_MAX:
        raise BadRequest(f"{value!r} is not a message id; it must be between 0 and 2^63-1")
    return value, None


def suffix_of(ulid: str | None) -> int:
    """Return the id suffix of a ULID that a broker sent; 0 without one."""
    return 0 if ulid is None else from_ulid(ulid)[1]


def check_id(value: object) -> None:
    """Raise BadRequest unless this is an integer, its digits or a ULID."""
    parse_id(value)
