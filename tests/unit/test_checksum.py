"""crc32c without its package: the same function, even if the package is imported before or after."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from heapline import checksum

CHECK = "assert crc32c(b'123456789') == crc32c(b'6789', crc32c(b'12345')) == 0xE3069283"
ALONE = f"import sys; from heapline.checksum import crc32c; {CHECK}; assert 'crc32c' not in sys.modules"


@pytest.mark.parametrize(
    "program",
    [
        ALONE,
        f"{ALONE}; from crc32c import crc32c; {CHECK}",
        f"from crc32c import crc32c; from heapline.checksum import crc32c; {CHECK}",
    ],
    ids=["alone", "before the package", "after the package"],
)
def test_checksum_is_the_published_one(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_package_is_imported_if_its_extension_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PathFinder", SimpleNamespace(find_spec=lambda *_: None))
    package: Any = checksum._load()
    assert package.__name__ == "crc32c"
    assert package.crc32c(b"123456789") == 0xE3069283
