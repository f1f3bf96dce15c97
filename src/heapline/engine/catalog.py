"""The catalog: a data directory's topics and their configs, in one small file that is replaced atomically.

`catalog.json`, format version 1. To change it once a version has been released: bump the version, keep reading the old
one, add a fixture. `crc32c` is the checksum of the text with its own eight digits as zeros: folders that the catalog
does not name are deleted, so a flipped bit in a name must never pass for another name. For the same reason the file is
written before the first topic is created, and a missing file beside topics is corruption.
An incarnation number is never assigned twice, so a deleted and recreated topic shares nothing with the old one.
"""

from __future__ import annotations

import re

import msgspec

from heapline.checksum import crc32c
from heapline.contract.config import TopicConfig
from heapline.contract.errors import CorruptionError, UnknownFormat
from heapline.journal.disk import Disk
from heapline.logs import Log

VERSION = 1
FILE = "catalog.json"
KEYS_FILE = "auth.json"  # a server's keys and users; server/auth/store.py reads `has_keys`
log = Log("heapline.engine")
_CRC = re.compile(rb'"crc32c": "[0-9a-f]{8}"')


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    name: str
    incarnation: int
    config: TopicConfig
    id_suffix: int  # the low 58 bits of its ULIDs, random; another incarnation has another
    floor_ms: int = 0  # its time starts no earlier: ids of topics deleted before it are never assigned again

    @property
    def topic(self) -> str:
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"

    @property
    def folder(self) -> str:
        return f"topics/{self.namespace}/{self.name}.{self.incarnation}"


class _File(msgspec.Struct, kw_only=True):
    version: int
    crc32c: str = "00000000"
    next_incarnation: int = 1
    floor_ms: int = 0  # after the last id of every topic that was deleted
    topics: list[Entry] = []
    has_keys: bool = False  # a server's keys and users were in the directory: without their file it is not served


def _with_checksum(text: bytes) -> bytes:
    blank = _CRC.sub(b'"crc32c": "00000000"', text, count=1)
    return _CRC.sub(b'"crc32c": "%08x"' % crc32c(blank), blank, count=1)


_decode_file = msgspec.json.Decoder(_File).decode


class Catalog:
    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._path = f"{directory}/{FILE}"
        self._file = self._load()
        self.entries: dict[tuple[str, str], Entry] = {(e.namespace, e.name): e for e in self._file.topics}

    def _load(self) -> _File:
        if not self._disk.exists(self._path):
            if self._has_topics():
                raise self._damaged("it is missing, though there are topics")
            return _File(version=VERSION)
        data = self._disk.read_file(self._path)
        try:
            version = msgspec.json.decode(data, type=dict)["version"]
            if version != VERSION:
                raise UnknownFormat(self._path, version)
            file = _decode_file(data)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from error
        if not _CRC.search(data) or _with_checksum(data) != data:
            raise self._damaged("it does not match its checksum")
        return file

    def _has_topics(self) -> bool:
        top = f"{self._directory}/topics"
        return self._disk.exists(top) and any(self._disk.listdir(f"{top}/{name}") for name in self._disk.listdir(top))

    def _damaged(self, detail: str) -> CorruptionError:
        return CorruptionError(
            f"{self._path} cannot be read ({detail}): restore it from a backup; the topics' own files are untouched"
        )

    def make(self) -> None:
        """Create the file at the beginning, so that a missing file can be distinguished from a new directory.

        Record in it whether the directory has keys, so that a new directory can be distinguished from lost keys.
        """
        finds_keys = not self.has_keys and self._disk.exists(f"{self._directory}/{KEYS_FILE}")
        if not self._disk.exists(self._path):
            self._save({}, self._file.next_incarnation, has_keys=finds_keys)
        elif finds_keys:
            try:
                self._save(self.entries, self._file.next_incarnation, has_keys=True)
            except OSError as error:  # a full disk must not keep the queue closed
                log.warning("keys not recorded in the catalog; will retry on next open", cause=str(error))

    @property
    def has_keys(self) -> bool:
        return self._file.has_keys

    @property
    def next_incarnation(self) -> int:
        return self._file.next_incarnation

    def planned(self, namespace: str, name: str, config: TopicConfig, id_suffix: int) -> Entry:
        """Return the entry of a new topic, for `add`. Its folder is created in between."""
        return Entry(
            namespace=namespace,
            name=name,
            incarnation=self._file.next_incarnation,
            config=config,
            id_suffix=id_suffix,
            floor_ms=self._file.floor_ms,
        )

    def add(self, entry: Entry) -> None:
        """Add a topic. Durable on return. Only then does it exist: no message can have an id with another suffix."""
        self._save(self.entries | {(entry.namespace, entry.name): entry}, entry.incarnation + 1)

    def change(self, entry: Entry, config: TopicConfig) -> Entry:
        changed = msgspec.structs.replace(entry, config=config)
        self._save(self.entries | {(entry.namespace, entry.name): changed}, self._file.next_incarnation)
        return changed

    def remove(self, entry: Entry, last_ms: int) -> None:
        """Remove a topic. `last_ms` is the time in its last id."""
        kept = {place: e for place, e in self.entries.items() if e is not entry}
        self._save(kept, self._file.next_incarnation, max(self._file.floor_ms, last_ms + 1))

    def _save(
        self,
        entries: dict[tuple[str, str], Entry],
        next_incarnation: int,
        floor_ms: int | None = None,
        *,
        has_keys: bool = False,
    ) -> None:
        """Write the file, then update the in-memory state."""
        file = _File(
            version=VERSION,
            next_incarnation=next_incarnation,
            topics=list(entries.values()),
            floor_ms=self._file.floor_ms if floor_ms is None else floor_ms,
            has_keys=has_keys or self._file.has_keys,
        )
        self._write(self._path, file)
        self._file, self.entries = file, entries

    def _write(self, path: str, file: _File) -> None:
        text = msgspec.json.format(msgspec.json.encode(file), indent=1)
        self._disk.write_file_atomic(path, _with_checksum(text))

    def write_copy(self, path: str, entries: dict[tuple[str, str], Entry]) -> None:
        """Write a catalog of these topics alone for another directory, which continues from here."""
        self._write(path, msgspec.structs.replace(self._file, topics=list(entries.values())))
