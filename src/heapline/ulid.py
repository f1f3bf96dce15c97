"""The two spellings of a message id: the integer, and a ULID.

    integer: ms since 2024-01-01T00:00:00Z (41 bits) | partition (10) | sequence (12)
    ULID:    48 bits of Unix milliseconds | partition | sequence | 58 zero bits

so that ULID tools read the right time and strings sort as the integers do. How ids are made is in core/ids.py.
"""

from __future__ import annotations

from heapline.errors import BadRequest

EPOCH_2024_MS = 1_704_067_200_000
MS_BITS, PARTITION_BITS, SEQUENCE_BITS = 41, 10, 12
ID_MAX = (1 << 63) - 1

_SEQUENCES = 1 << SEQUENCE_BITS
_MS_SHIFT = PARTITION_BITS + SEQUENCE_BITS
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Both cases by table: str.upper() would also let letters such as U+017F through.
_DIGIT = {ch: n for n, up in enumerate(_ALPHABET) for ch in (up, up.lower())}
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_ULID_CHARS = 26
#: 12 bits of sequence fill two characters and two fifths of a third; the rest of the string is zero bits.
_TAILS = [_PAIRS[s >> 2] + _ALPHABET[(s & 3) << 3] + "0" * 11 for s in range(_SEQUENCES)]
_PAD_BITS = 58
_INTEGER_DIGITS_MAX = 19


def to_ulid(message_id: int) -> str:
    return to_ulids([message_id])[0]


def to_ulids(message_ids: list[int]) -> list[str]:
    """The ULIDs of ids; neighbours in time share their prefix, so sorted batches are the cheap case."""
    out: list[str] = []
    hour, hour_chars, prefix_of, prefix = -1, "", -1, ""
    for message_id in message_ids:
        if message_id >> SEQUENCE_BITS != prefix_of:
            if not 0 <= message_id <= ID_MAX:
                raise BadRequest(f"{message_id} is not a message id: it is outside 0..2^63-1")
            prefix_of = message_id >> SEQUENCE_BITS
            ms = (message_id >> _MS_SHIFT) + EPOCH_2024_MS
            if ms >> 20 != hour:
                hour = ms >> 20
                hour_chars = _PAIRS[hour >> 20] + _PAIRS[(hour >> 10) & 1023] + _PAIRS[hour & 1023]
            prefix = hour_chars + _PAIRS[(ms >> 10) & 1023] + _PAIRS[ms & 1023] + _PAIRS[prefix_of & 1023]
        out.append(prefix + _TAILS[message_id & 4095])
    return out


def from_ulid(text: str) -> int:
    """The id that `text` spells; refuses every ULID that `to_ulid` cannot have made, lower case apart."""
    if len(text) != _ULID_CHARS:
        raise BadRequest(f"{text[:40]!r} is not a message id: a ULID has {_ULID_CHARS} characters")
    value = 0
    for ch in text:
        digit = _DIGIT.get(ch)
        if digit is None:
            raise BadRequest(f"{text!r} is not a message id: {ch!r} is not a ULID character")
        value = value << 5 | digit
    if value & ((1 << _PAD_BITS) - 1):
        raise BadRequest(f"{text!r} is a ULID, but not one that Heapline made: its last bits are not zero")
    ms = (value >> 80) - EPOCH_2024_MS
    if not 0 <= ms < 1 << MS_BITS:
        raise BadRequest(f"{text!r} is a ULID, but not one that Heapline made: its time is out of range")
    return ms << _MS_SHIFT | (value >> _PAD_BITS) & ((1 << _MS_SHIFT) - 1)


def parse_id(spelling: object) -> int:
    """An id from either spelling: an integer (or its decimal digits), or a ULID. Anything else is refused."""
    if isinstance(spelling, str):
        if len(spelling) == _ULID_CHARS:
            return from_ulid(spelling)
        if not (spelling.isascii() and spelling.isdigit() and len(spelling) <= _INTEGER_DIGITS_MAX):
            raise BadRequest(f"{spelling[:40]!r} is not a message id: give its integer or its ULID")
        spelling = int(spelling)
    if isinstance(spelling, bool) or not isinstance(spelling, int) or not 0 <= spelling <= ID_MAX:
        raise BadRequest(f"{spelling!r} is not a message id: it is outside 0..2^63-1")
    return spelling
