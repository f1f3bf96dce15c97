"""Files that pages load: our own, and those of others that the build has fetched. They are read once."""

from __future__ import annotations

import hashlib
import mimetypes
import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class StaticFile:
    data: bytes
    media_type: str
    digest: str


def read_files() -> dict[str, StaticFile]:
    found = {}
    root = files("heapline.dashboard") / "static"
    folders = [("", root)]
    while folders:
        prefix, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            elif kind := mimetypes.guess_type(entry.name)[0]:
                data = entry.read_bytes()
                found[prefix + entry.name] = StaticFile(data, kind, hashlib.blake2b(data, digest_size=8).hexdigest())
    return found


def third_party_files() -> list[str]:
    """Return the files that the build must have fetched; without them pages show less, and say so."""
    pins = tomllib.loads((files("heapline.dashboard") / "third_party.toml").read_text())
    names = [name for package in pins["package"] for name in package["files"].values() if "LICENSE" not in name]
    return [f"vendor/{name}" for name in [*names, "icons.svg"]]
