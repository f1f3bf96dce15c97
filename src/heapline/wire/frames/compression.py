"""Compression of bodies on the native wire: zstd, if a module for it is installed.

Python 3.14 has `compression.zstd`; `backports.zstd` is the same for older versions. Without either, a side does not
announce zstd and bodies travel as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

LEVEL = 1  # the network is rarely slower than a higher level
WINDOW_LOG_MAX = 23  # 8 MiB, as RFC 8878 recommends: a decoder allocates the window that a frame names
MODULES = ("compression.zstd", "backports.zstd")


class Compression(Protocol):
    def compress(self, data: bytes | memoryview) -> bytes: ...

    def unpacked_size(self, data: bytes | memoryview) -> int | None:
        """Return the size after decompression, or None if the data does not name it or is damaged."""
        ...

    def decompress(self, data: bytes | memoryview, size_max: int) -> bytes:
        """Raise ValueError if the data is damaged or becomes larger than `size_max`."""
        ...


class Zstd:
    def __init__(self, module: Any) -> None:
        self._module = module

    def compress(self, data: bytes | memoryview) -> bytes:
        compressed: bytes = self._module.compress(data, LEVEL)
        return compressed

    def unpacked_size(self, data: bytes | memoryview) -> int | None:
        try:
            size: int | None = self._module.get_frame_info(data).decompressed_size
        except self._module.ZstdError:
            return None
        return size

    def decompress(self, data: bytes | memoryview, size_max: int) -> bytes:
        module = self._module
        decompressor = module.ZstdDecompressor(options={module.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
        try:
            size = self.unpacked_size(data)
            if size is not None and size > size_max:
                raise ValueError(f"{size} bytes when decompressed; the limit is {size_max}")
            plain: bytes = decompressor.decompress(data, size_max + 1)
        except module.ZstdError as error:
            raise ValueError(f"not a zstd frame: {error}") from None
        if len(plain) > size_max:
            raise ValueError(f"over {size_max} bytes when decompressed")
        if not decompressor.eof or decompressor.unused_data:
            raise ValueError("not exactly one zstd frame")
        return plain


@cache  # a failed import is searched for again each time
def installed(modules: tuple[str, ...] = MODULES) -> Mapping[str, Compression]:
    """Return the compressions that this process can announce, by their feature name."""
    for name in modules:
        try:
            return {"zstd": Zstd(importlib.import_module(name))}
        except ImportError:
            continue
    return {}
