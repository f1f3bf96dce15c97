"""Modules import one another without cycles: none at runtime, and few that exist for type checkers alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import heapline

SOURCE = Path(heapline.__file__).parents[1]
#: The one left: contract/method.py types methods for SyncBroker too, which extends them. Never raise it.
TYPE_CHECKING_CYCLES_MAX = 1

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (SOURCE / "heapline").rglob("*.py")
}


def _imports(module: str, *, typing: bool) -> set[str]:
    """Return the modules that a module imports at its top level, with or without those under TYPE_CHECKING."""
    found: set[str] = set()
    for node in _top_level(ast.parse(MODULES[module].read_text(encoding="utf-8")).body, typing=typing):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert not node.level, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {module, "heapline", ""}  # the package itself imports each name when it is first used


def _top_level(body: list[ast.stmt], *, typing: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            is_typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            if typing or not is_typing:
                yield from _top_level(node.body, typing=typing)
            yield from _top_level(node.orelse, typing=typing)
        elif isinstance(node, ast.Try | ast.With):
            yield from _top_level(node.body, typing=typing)


def _cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the sets of modules that reach one another."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for middle in graph:  # Warshall's transitive closure, on sets
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    in_cycles = {module for module in graph if module in reach[module]}
    return sorted({tuple(sorted(m for m in reach[module] if module in reach[m])) for module in in_cycles})


def _graph(*, typing: bool) -> dict[str, set[str]]:
    return {module: _imports(module, typing=typing) for module in MODULES if module != "heapline"}


def test_no_modules_import_each_other_at_runtime() -> None:
    assert _cycles(_graph(typing=False)) == []


def test_import_cycles_under_type_checking_do_not_grow() -> None:
    cycles = _cycles(_graph(typing=True))
    assert len(cycles) <= TYPE_CHECKING_CYCLES_MAX, cycles


def test_cycle_is_detected() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert _cycles(graph) == [("a", "b", "c")]
