"""Forms that browsers send, bounded in size and time."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import Request

from heapline.contract.errors import BadRequest
from heapline.server.protocols.http import TooLarge, TooSlow

FORM_BYTES_MAX, FORM_SECONDS_MAX = 256 << 10, 10.0


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, bounded in size and time."""
    data = bytearray()
    try:
        async with asyncio.timeout(FORM_SECONDS_MAX):
            async for part in request.stream():
                data += part
                if len(data) > FORM_BYTES_MAX:
                    raise TooLarge(f"a form may have at most {FORM_BYTES_MAX} bytes")
    except TimeoutError:
        raise TooSlow(f"a form must arrive within {FORM_SECONDS_MAX:.0f} seconds") from None
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, errors="strict")
    except (UnicodeDecodeError, ValueError):
        raise BadRequest("the form is not UTF-8") from None
    return joined(pairs)


def joined(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return fields by name. One with several values, such as selected rows, becomes lines."""
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return {name: "\n".join(values) for name, values in fields.items()}
