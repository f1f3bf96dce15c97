"""The checksum crc32c, from the package of that name, without what the package imports beside it.

`import crc32c` asks importlib.metadata for the package's version, which takes 22 ms of CPU: more than asyncio, and a
tenth of opening a broker. So the package's extension module is loaded alone. If it is not where it is expected, the
package is imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crc32c import crc32c

__all__ = ["crc32c"]
EXTENSION = "crc32c._crc32c"


def _load() -> object:
    package = find_spec("crc32c")
    spec = package and PathFinder.find_spec(EXTENSION, package.submodule_search_locations)
    if not spec or not spec.loader:
        import crc32c

        return crc32c
    extension = module_from_spec(spec)
    spec.loader.exec_module(extension)
    return sys.modules.setdefault(EXTENSION, extension)  # a later `import crc32c` finds it


if not TYPE_CHECKING:
    crc32c = _load().crc32c
