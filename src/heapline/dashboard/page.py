"""Pages by path. A page reads what it shows with commands, as the caller, and its template shows that."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.routing import compile_path

from heapline.contract.errors import BadRequest
from heapline.dashboard.caller import Caller

PLACE_MAX = 2000  # characters of a path with its query


@dataclass(frozen=True)
class Place:
    """A page's content, as its URL has it: the path below /ui, its parameters and the query."""

    path: str
    parameters: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def key(self) -> str:
        """Return one text for each place, whatever the order of its query."""
        query = urlencode(sorted(self.query.items()))
        return f"{self.path}?{query}" if query else self.path

    def __getitem__(self, name: str) -> str:
        return self.parameters[name]

    def get(self, name: str, default: str = "") -> str:
        return self.query.get(name, default)

    def choice(self, name: str, *choices: str) -> str:
        """Return the value of a query parameter if it is one of these, otherwise the first of them."""
        found = self.query.get(name, "")
        return found if found in choices else choices[0]

    def link(self, **changes: str | None) -> str:
        """Return the place with another query, below /ui: its first page, because others belong to this query."""
        query = {name: value for name, value in self.query.items() if name not in ("cursor", "from")}
        changed = {name: value for name, value in (query | changes).items() if value}
        return path_to(self.path, **changed)


def path_to(path: str, **query: str) -> str:
    """Return a path with a query. The path is not encoded yet, as Starlette has it."""
    encoded = quote(path, safe="/")
    return f"{encoded}?{urlencode(query)}" if query else encoded


Load = Callable[[Caller, Place], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class PageKind:
    path: str
    section: str  # of the rail
    template: str
    load: Load
    is_live: bool = True


PAGES: list[PageKind] = []


def page(path: str, section: str, template: str, *, is_live: bool = True) -> Callable[[Load], Load]:
    """Register a page. `load` returns the variables of its template, `title` among them."""

    def register(load: Load) -> Load:
        PAGES.append(PageKind(path, section, template, load, is_live))
        return load

    return register


def find(path: str, query: str) -> tuple[PageKind, Place] | None:
    """Return the page of a path below /ui, and its place."""
    if len(path) + len(query) > PLACE_MAX:
        raise BadRequest("this address is too long")
    for kind in PAGES:
        pattern, _, _ = compile_path(kind.path)
        if found := pattern.match(path):
            try:
                pairs = dict(parse_qsl(query, errors="strict"))
            except (UnicodeDecodeError, ValueError):
                raise BadRequest("the query of this address is not valid") from None
            return kind, Place(path, found.groupdict(), pairs)
    return None


def element_id(prefix: str, *names: object) -> str:
    """Return an id that is the same for the same names, and is valid whatever they contain."""
    text = "\0".join(map(str, names))
    return f"{prefix}-{hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=8).hexdigest()}"
