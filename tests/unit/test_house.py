"""Rules about the repository: public names, the error tree, the purity of core, and the content of files."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import pydoc
import re
import subprocess
import sys
import tomllib
import types
from functools import cache
from pathlib import Path

import pytest

import heapline
from heapline.contract import errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "heapline"

ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.HeaplineError) and cls.__module__ == errors.__name__
]
LEAVES = [cls for cls in ERRORS if "__init__" in vars(cls)]


@cache
def kept_files() -> tuple[Path, ...]:
    """Files that git tracks or would track: a mistake should fail before it is committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name.decode() for name in listing.stdout.split(b"\0") if name)
    return tuple(path for path in paths if path.is_file())


# --- public names -----------------------------------------------------------------------------------------------------


def test_all_lists_exactly_the_public_names() -> None:
    # `from __future__ import annotations` leaves a name; submodules are imported by their path.
    offered = {name for name in dir(heapline) if not name.startswith("_")} - {"annotations"}
    submodules = {name for name in offered if isinstance(getattr(heapline, name), types.ModuleType)}
    assert offered - submodules == set(heapline.__all__) - {"__version__"}
    assert len(heapline.__all__) == len(set(heapline.__all__))


def test_names_of_the_contract_are_public() -> None:
    spelled = {"open", "open_sync", "Outgoing", "DlqFilter", "Backoff", "Producer", "TopicConfig"}
    assert spelled <= set(heapline.__all__)


@pytest.mark.parametrize("way", ["from heapline import outbox", "import heapline.outbox", "heapline.outbox"])
def test_outbox_is_imported_on_first_use_by_every_spelling(way: str) -> None:
    program = f"import sys, heapline; assert 'heapline.outbox' not in sys.modules; {way}; heapline.outbox.enqueue"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_every_error_is_public() -> None:
    assert {cls.__name__ for cls in ERRORS} <= set(heapline.__all__)


def test_every_module_imports_without_extras() -> None:
    rooms_with_extras = ("heapline.server", "heapline.spark", "heapline.cluster", "heapline.sql", "heapline.dashboard")
    rooms_with_extras += ("heapline.outbox.django.",)  # models need a configured project
    for module in pkgutil.walk_packages(heapline.__path__, "heapline."):
        if not module.name.startswith(rooms_with_extras) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.mark.parametrize("name", sorted({*heapline.__all__} - {"__version__"}))
def test_help_describes_every_public_name(name: str) -> None:
    assert name in pydoc.render_doc(getattr(heapline, name))


def test_help_of_methods_names_plain_types() -> None:
    text = pydoc.plain(pydoc.render_doc(heapline.Broker))
    assert "message_history(self, topic: str, message_id: Union[str, int], limit: int = 100, cursor: " in text
    assert "Annotated" not in text
    assert " at 0x" not in text


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_importing_heapline_does_not_load_the_command_line() -> None:
    program = "import sys, heapline; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "heapline" in loaded
    assert not {"typer", "rich", "pydantic", "pytest", "hypothesis"} & set(loaded)


def test_importing_heapline_loads_only_used_modules() -> None:
    program = (
        "import sys, heapline; loaded = set(sys.modules)\n"
        "assert not {name for name in loaded if name.startswith('heapline.')}\n"
        "assert not {'numpy', 'asyncio', 'msgspec', 'grpc'} & loaded\n"
        "assert heapline.TopicNotFound is heapline.contract.errors.TopicNotFound\n"
        "assert heapline.Outgoing is heapline.contract.message.Outgoing\n"
        "assert 'numpy' not in sys.modules\n"
        "heapline.connect\n"
        "assert 'heapline.engine.broker' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


CLIENT_NEVER_LOADS = {"zoneinfo", "cronsim", "typer", "rich", "starlette", "uvicorn", "structlog", "sqlalchemy"}


def test_client_loads_only_the_modules_it_needs() -> None:
    program = "import sys, heapline.client.sdk; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(told.stdout.split())
    assert not CLIENT_NEVER_LOADS & {name.partition(".")[0] for name in loaded}
    for package in ("engine", "core", "journal", "server", "cli", "assign", "outbox", "testing", "wire.json"):
        assert not {name for name in loaded if f"{name}.".startswith(f"heapline.{package}.")}


OPENS_AND_ENQUEUES = """
import asyncio, sys, tempfile, heapline
async def main():
    with tempfile.TemporaryDirectory() as directory:
        async with heapline.open(directory) as hl:
            await hl.create_topic("jobs")
            await hl.enqueue("jobs", b"hello")
            print(*sys.modules)
asyncio.run(main())
"""
DECLARES_TASKS = "import sys, heapline; app = heapline.App('localhost:1'); app.task(lambda: None); print(*sys.modules)"


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        (OPENS_AND_ENQUEUES, {"heapline.assign", "heapline.journal.verify", "heapline.client", "heapline.server"}),
        (
            OPENS_AND_ENQUEUES,
            {"zoneinfo", "cronsim", "numpy.random", "importlib.metadata", "structlog", "grpc", "rich"},
        ),
        (DECLARES_TASKS, {"numpy", "heapline.core", "heapline.engine", "grpc", "opentelemetry", "zoneinfo", "rich"}),
    ],
    ids=["broker, own packages", "broker, libraries", "tasks"],
)
def test_start_loads_only_the_modules_it_needs(program: str, unneeded: set[str]) -> None:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "heapline.contract.broker" in loaded
    assert not unneeded & loaded


def test_time_zones_are_loaded_for_a_cron_and_not_for_an_interval() -> None:
    program = (
        "import sys; from heapline.contract.schedules import make_schedule\n"
        "make_schedule('a', topic='t', every=60); assert not {'zoneinfo', 'cronsim'} & set(sys.modules)\n"
        "make_schedule('a', topic='t', cron='0 3 * * *'); assert {'zoneinfo', 'cronsim'} <= set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_name_raises_attribute_error() -> None:
    for module in (heapline, heapline.engine):
        with pytest.raises(AttributeError, match="no attribute 'conect'"):
            module.conect  # noqa: B018
    assert heapline.engine.SyncBroker.__module__ == "heapline.engine.broker"


# --- errors -----------------------------------------------------------------------------------------------------------


def drawn_tree(docstring: str) -> dict[str, str | None]:
    """Return child → parent, read from the tree in the docstring: each level is indented four columns further."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in docstring.splitlines():
        drawn = re.match(r"    (?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)", line)
        if drawn and (drawn["branch"] or drawn["name"] == "HeaplineError"):
            depth = len(drawn["branch"]) // 4
            path[depth:] = [drawn["name"]]
            parents[drawn["name"]] = path[depth - 1] if depth else None
    return parents


def test_error_tree_in_the_docstring_is_correct() -> None:
    actual = {
        cls.__name__: next((base.__name__ for base in cls.__bases__ if issubclass(base, errors.HeaplineError)), None)
        for cls in ERRORS
    }
    assert drawn_tree(errors.__doc__ or "") == actual


SAMPLES = {"str": "sample", "int": 7, "list[str]": ["a", "b"], "list[int]": [1, 2, 3, 4]}


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_error_carries_its_fields_and_can_be_raised_again_from_them(cls: type[errors.HeaplineError]) -> None:
    parameters = inspect.signature(cls).parameters
    assert tuple(parameters) == cls.fields
    given = {name: SAMPLES[parameter.annotation] for name, parameter in parameters.items()}
    error = cls(**given)
    assert error.facts() == given
    again = cls(**error.facts())
    assert str(again) == str(error) != ""


@pytest.mark.parametrize("cls", [cls for cls in ERRORS if cls not in LEAVES], ids=lambda cls: cls.__name__)
def test_error_branch_says_what_to_do(cls: type[errors.HeaplineError]) -> None:
    assert cls.__doc__


# --- purity of core ---------------------------------------------------------------------------------------------------

CORE_LIBRARIES = {"numpy", "msgspec", "xxhash"}
CORE_HOUSE = (
    "heapline.accelerator",
    "heapline.core",
    *(f"heapline.contract.{module}" for module in ("config", "cron", "errors", "ids", "message", "schedules")),
)
#: Clocks, randomness, files, sockets, threads: everything that makes the same input give another output.
WORLD = {
    *("time", "random", "secrets", "uuid", "os", "io", "pathlib", "shutil", "tempfile", "mmap", "fcntl", "logging"),
    *("asyncio", "threading", "multiprocessing", "concurrent", "subprocess", "signal", "select", "selectors"),
    *("socket", "ssl", "http", "urllib", "sched", "platform", "getpass"),
}


def imported_modules(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports must be absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def impurities(source: str) -> list[str]:
    tree = ast.parse(source)
    found = []
    for name in sorted(imported_modules(tree)):
        top = name.partition(".")[0]
        in_house = top == "heapline" and f"{name}.".startswith(tuple(f"{room}." for room in CORE_HOUSE))
        pure_stdlib = top in sys.stdlib_module_names and top not in WORLD
        if not (in_house or pure_stdlib or top in CORE_LIBRARIES) or name.startswith("numpy.random"):
            found.append(f"imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append("opens a file")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"np.random", "numpy.random", "datetime.now"}:
            found.append(f"uses {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda path: path.name)
def test_core_is_pure(path: Path) -> None:
    assert impurities(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from os import path",
        "import os.path",
        "import structlog",
        "from heapline.journal import unit",
        "from heapline import engine",
        "from heapline.clock import SystemClock",
        "open('x')",
        "import numpy as np\nnp.random.default_rng()",
        "from datetime import datetime\ndatetime.now()",
    ],
)
def test_purity_check_detects(source: str) -> None:
    assert impurities(source)


# --- content of files -------------------------------------------------------------------------------------------------

# Assembled from halves, so that this file does not match.
MACHINE_TRACES = re.compile(
    "|".join(
        [
            r"(?<![\w.])/wo" r"rk/(?:main|shared)",
            r"(?<![\w.])/ro" r"ot/\w",
            r"(?<![\w.])/ho" r"me/[a-z][\w-]*/",
            r"(?<![\w.])/Us" r"ers/[A-Za-z]",
            r"/o" r"pt/(?:py" r"pi|wheels)",
            r"\bpy" r"pi\.(?:org|python\.org)",
            r"python" r"hosted\.org",
            r"--(?:extra-)?index" r"-url\b",
        ]
    ).encode()
)


def test_no_file_names_this_machine_or_a_registry() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {trace.group().decode()}"
        for path in kept_files()
        for trace in MACHINE_TRACES.finditer(path.read_bytes())
    }
    assert found == set()


SHARED_LINES_MAX = 12
SOURCES = sorted((ROOT / "src" / "heapline").rglob("*.py"))


def test_no_two_places_share_more_than_twelve_lines() -> None:
    seen: dict[tuple[str, ...], str] = {}
    found = []
    for path in SOURCES:
        lines = [(n, line.strip()) for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line.strip()]
        for i in range(len(lines) - SHARED_LINES_MAX):
            run = tuple(line for _, line in lines[i : i + SHARED_LINES_MAX + 1])
            here = f"{path.relative_to(ROOT)}:{lines[i][0]}"
            if (first := seen.setdefault(run, here)) != here:
                found.append(f"{first} and {here}")
    assert found == []


def test_texts_have_no_words_that_a_native_speaker_would_not_write() -> None:
    words = re.compile(r"\b(?:whoever|nobody|somebody|anew|is told|was told|are told)\b", re.IGNORECASE)
    paths = [*SOURCES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: path.read_text("utf-8").replace('"nobody"', "") for path in paths}  # an address in an example
    assert [(path.name, word) for path, text in texts.items() for word in words.findall(text)] == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    riddle = re.compile(r"(?:What|Who|Whoever|Whose|Where|Which|Of|Those|That|The same|None:)\b")
    found = []
    for path in kept_files():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    found += [f"{path.relative_to(ROOT)}: {text}"] if riddle.match(text) else []
    assert found == []


def test_no_lock_file_is_tracked() -> None:
    assert [path.name for path in kept_files() if re.fullmatch(r"(uv|poetry|pdm)\.lock|Pipfile\.lock", path.name)] == []


def canonical(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_constraints_pin_names_and_versions_only_and_every_dependency() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.!]*", line)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {canonical(item) for item in [*project["dependencies"], *project["optional-dependencies"]["dev"]]}
    pinned = {canonical(line) for line in lines}
    assert needed - {"heapline"} <= pinned  # dev includes the server's extra
    assert "heapline" not in pinned


# --- documents --------------------------------------------------------------------------------------------------------


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_between_documents_resolve(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_make_commands_in_documents_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {first or second for first, second in named} - targets == set()
