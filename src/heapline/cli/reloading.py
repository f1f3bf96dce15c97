"""Which source file has changed, by its time of modification. Looks, and knows nothing of what is done about it."""

from __future__ import annotations

import os
from pathlib import Path

PASSED_OVER = {"__pycache__", "node_modules", "venv", "site-packages"}


class SourceWatch:
    """`.py` files below a directory, hidden directories and installed packages left out."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = self._look()

    def changed(self) -> str | None:
        """A file that is new, gone or other than at the last look."""
        before, self._known = self._known, self._look()
        if before == self._known:
            return None
        return next(path for path in sorted(before.keys() | self._known) if before.get(path) != self._known.get(path))

    def _look(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for directory, names, files in os.walk(self._directory):
            names[:] = [n for n in names if not n.startswith(".") and n not in PASSED_OVER]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(directory, name)
                    try:
                        status = os.stat(path)
                    except FileNotFoundError:
                        continue  # gone just now
                    found[os.path.relpath(path, self._directory)] = (status.st_mtime_ns, status.st_size)
        return found
