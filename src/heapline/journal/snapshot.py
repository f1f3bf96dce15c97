"""Snapshots: the topic's state at a unit, so that opening a topic need not replay the complete journal.

SNAPSHOT_VERSION 1 (to change it: bump, keep the old reader, add a fixture). Both kinds of file are

    magic (8) | version (1) | 7 zeros | number (8) | length (8) | body | crc32c of all before (4)

- `<unit:016d>.snap`, the manifest: number = unit; body = msgpack [state, [[blob name, length, crc], …]].
- `<name>.blob`: number = 0; body = the bytes. A blob never changes: one that an earlier verified snapshot refers to
  is not written again. The caller names blobs, `<kind>-<partition>-<serial>`, and never reuses a name for other bytes.

Order of a write: blobs, synced and read back; their directory; the manifest, synced, read back, renamed; the directory.
After a kill at any point the snapshot exists completely or not at all, and the two before it are untouched: files are
deleted only after two newer snapshots were verified. The meaning of the state is not known here. The caller snapshots
only durable units.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping, Sequence

import msgspec

from heapline.checksum import crc32c
from heapline.contract.errors import SnapshotCorrupt, UnknownFormat
from heapline.journal.disk import Buffer, Disk

SNAPSHOT_VERSION = 1
SNAP_MAGIC = b"HEAPSNAP"
BLOB_MAGIC = b"HEAPBLOB"
KEPT = 2
_HEADER = struct.Struct("<8sB7xQQ")
_BLOB_NAME = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")


class BlobRef(msgspec.Struct, array_like=True, frozen=True):
    name: str
    length: int
    crc: int


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    state: bytes
    blobs: list[BlobRef]


_decode_manifest = msgspec.msgpack.Decoder(Manifest).decode


class Snapshot(msgspec.Struct, frozen=True):
    unit: int
    state: bytes
    blobs: dict[str, memoryview]


def _framed(magic: bytes, number: int, parts: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Return the parts with header and checksum around them, and that checksum."""
    length = sum(memoryview(part).nbytes for part in parts)
    framed: list[Buffer] = [_HEADER.pack(magic, SNAPSHOT_VERSION, number, length), *parts]
    crc = 0
    for part in framed:
        crc = crc32c(part, crc)
    return [*framed, crc.to_bytes(4, "little")], crc


def _unframed(data: bytes, magic: bytes, number: int, path: str) -> tuple[memoryview, int]:
    """Return the body and the checksum of a file's bytes. Raise if they are not valid."""
    if len(data) < _HEADER.size + 4 or crc32c(memoryview(data)[:-4]).to_bytes(4, "little") != data[-4:]:
        raise SnapshotCorrupt(path, "it does not match its checksum")
    found_magic, version, found_number, length = _HEADER.unpack_from(data)
    if found_magic != magic or found_number != number:
        raise SnapshotCorrupt(path, "its content belongs to another file name")
    if version != SNAPSHOT_VERSION:
        raise UnknownFormat(path, version)
    if length != len(data) - _HEADER.size - 4:
        raise SnapshotCorrupt(path, "its length is wrong")
    return memoryview(data)[_HEADER.size : -4], int.from_bytes(data[-4:], "little")


class SnapshotStore:
    """The snapshots of one topic, in their own directory. One writer; call `load_newest` before `write`."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self.disk, self.directory = disk, directory
        self.damaged: list[SnapshotCorrupt] = []
        self._verified: dict[int, list[BlobRef]] = {}  # unit -> blobs
        self._manifest_bytes = 0  # bytes of the newest manifest
        disk.mkdir(directory)

    @property
    def older_unit(self) -> int:
        """The unit of the older of two verified snapshots, below which nothing is needed; 0 if there are not two."""
        return min(self._verified) if len(self._verified) >= KEPT else 0

    @property
    def newest_unit(self) -> int:
        return max(self._verified, default=0)

    def files_of(self, unit: int) -> list[str]:
        """Return the names of that snapshot's files, the manifest last. Raise SnapshotCorrupt if it is corrupt."""
        path = self._manifest_path(unit)
        blobs = [f"{ref.name}.blob" for ref in self._read_manifest(path, unit).blobs]
        return [*blobs, path.rpartition("/")[2]]

    def newest_bytes(self) -> tuple[int, list[BlobRef]]:
        """Return the size of the newest verified snapshot: its manifest and all its blobs."""
        return self._manifest_bytes, self._verified.get(self.newest_unit, [])

    def _manifest_path(self, unit: int) -> str:
        return f"{self.directory}/{unit:016d}.snap"

    def _blob_path(self, name: str) -> str:
        return f"{self.directory}/{name}.blob"

    def units(self) -> list[int]:
        """Return the units that have a manifest, valid or not; ascending."""
        names = (n[:-5] for n in self.disk.listdir(self.directory) if n.endswith(".snap"))
        return sorted(int(n) for n in names if len(n) == 16 and n.isdigit())

    def load_newest(self) -> Snapshot | None:
        """Return the newest valid snapshot, or None. Corrupt ones are listed in `damaged`."""
        for unit in reversed(self.units()):
            try:
                return self.load(unit)
            except SnapshotCorrupt as error:
                self.damaged.append(error)
        return None

    def load(self, unit: int) -> Snapshot:
        """Return that snapshot, verified. Raise SnapshotCorrupt if it is corrupt."""
        path = self._manifest_path(unit)
        manifest = self._read_manifest(path, unit)
        blobs = {ref.name: self._read_blob(ref) for ref in manifest.blobs}
        self._manifest_bytes = len(manifest.state)
        self._verified[unit] = manifest.blobs
        return Snapshot(unit, manifest.state, blobs)

    def _read(self, path: str) -> bytes:
        try:
            return self.disk.read_file(path)
        except OSError as error:
            raise SnapshotCorrupt(path, f"it cannot be read: {error}") from None

    def _read_manifest(self, path: str, unit: int) -> Manifest:
        body, _ = _unframed(self._read(path), SNAP_MAGIC, unit, path)
        try:
            return _decode_manifest(body)
        except msgspec.MsgspecError as error:
            raise SnapshotCorrupt(path, f"it cannot be decoded: {error}") from None

    def _read_blob(self, ref: BlobRef) -> memoryview:
        path = self._blob_path(ref.name)
        body, crc = _unframed(self._read(path), BLOB_MAGIC, 0, path)
        if len(body) != ref.length or crc != ref.crc:
            raise SnapshotCorrupt(path, "it is not the blob that the snapshot refers to")
        return body

    def write(self, unit: int, state: bytes, blobs: Mapping[str, Sequence[Buffer] | None]) -> None:
        """Store a snapshot. A blob given as None must be one that a verified snapshot refers to.

        An error leaves the earlier snapshots unchanged; the next successful write removes leftovers.
        """
        if self._verified and unit <= self.newest_unit:
            raise ValueError(f"a snapshot of unit {self.newest_unit} already exists; unit {unit} is not newer")
        known = {ref.name: ref for refs in self._verified.values() for ref in refs}
        refs = [known.get(name) or self._write_blob(name, parts) for name, parts in blobs.items()]
        for ref in refs:
            parts = blobs[ref.name]
            if parts is not None and sum(memoryview(p).nbytes for p in parts) != ref.length:
                raise ValueError(f"blob {ref.name!r} was stored before with other bytes; use a new name")
        self.disk.fsync_dir(self.directory)
        self._write_manifest(unit, Manifest(state, refs))
        self._manifest_bytes = len(state)
        self._verified[unit] = refs
        self._prune()

    def _write_blob(self, name: str, parts: Sequence[Buffer] | None) -> BlobRef:
        if parts is None:
            raise ValueError(f"no verified snapshot refers to blob {name!r}; pass its bytes")
        if not _BLOB_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a blob name; use <kind>-<partition>-<serial>")
        framed, crc = _framed(BLOB_MAGIC, 0, parts)
        ref = BlobRef(name, sum(memoryview(p).nbytes for p in parts), crc)
        self._put(self._blob_path(name), framed)
        self._read_blob(ref)
        return ref

    def _write_manifest(self, unit: int, manifest: Manifest) -> None:
        framed, _ = _framed(SNAP_MAGIC, unit, [msgspec.msgpack.encode(manifest)])
        path = self._manifest_path(unit)
        # Read back under its temporary name, so that a manifest with its final name is a verified one.
        self._put(path + ".tmp", framed)
        self._read_manifest(path + ".tmp", unit)
        self.disk.rename(path + ".tmp", path)
        self.disk.fsync_dir(self.directory)

    def _put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file and sync it, but not its name. Replaces a leftover of the same name."""
        file = self.disk.create(path + ".part")
        try:
            file.pwritev([memoryview(p).cast("B") for p in parts], 0)
            file.fdatasync()
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.unlink(path + ".part")
            raise
        finally:
            file.close()
        self.disk.rename(path + ".part", path)

    def _prune(self) -> None:
        """Keep the newest two verified snapshots and their blobs. Manifests are deleted first: none may lack a blob."""
        while len(self._verified) > KEPT:
            del self._verified[min(self._verified)]
        if len(self._verified) < KEPT:
            return
        for unit in self.units():
            if unit not in self._verified:
                self.disk.unlink(self._manifest_path(unit))
        self.disk.fsync_dir(self.directory)
        used = {f"{ref.name}.blob" for refs in self._verified.values() for ref in refs}
        for name in self.disk.listdir(self.directory):
            if name.endswith((".part", ".tmp")) or (name.endswith(".blob") and name not in used):
                self.disk.unlink(f"{self.directory}/{name}")
