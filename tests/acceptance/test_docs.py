"""Run all code in README and docs, as a reader would run it.

A section of README, or a page of docs/guide, is one walk: its blocks run one after the other in one directory
(pages.py says how). So is docs/spark.md, whose blocks share a Spark session that the page itself starts and stops. A
comment `<!-- ground: server -->` in it starts a server first, with its key in ./data; otherwise the walk starts from
nothing. Other pages show single pieces: each block of Python in docs/*.md runs separately, in an
empty directory. The shell blocks of docs/operations.md have their own test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import heapline
from heapline.cli.main import SUBCOMMANDS, Subcommands
from tests.acceptance.pages import ROOT, Block, Ports, Reader, blocks_of, fits

pytestmark = pytest.mark.xdist_group("docs")  # one server for all of them
GUIDE = ROOT / "docs" / "guide"
SPARK = ROOT / "docs" / "spark.md"
GROUND = re.compile(r"<!-- ground: (\w+) -->")
LINK = re.compile(r"(?<!\!)\[[^\]]+\]\(([^)\s]+)\)")


class Walk(NamedTuple):
    page: str
    ground: str
    blocks: list[Block]


def walk_of(page: str, text: str, line: int = 1) -> Walk:
    ground = GROUND.search(text)
    return Walk(page, ground[1] if ground else "nothing", blocks_of(text, line))


def walks() -> list[Walk]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found, line = [], 1
    for section in re.split(r"^(?=## )", readme, flags=re.MULTILINE):
        title = section.partition("\n")[0].strip("# ")
        found.append(walk_of(f"README.md, {title}", section, line))
        line += section.count("\n")
    for path in sorted(GUIDE.glob("*.md")):
        found.append(walk_of(f"guide/{path.name}", path.read_text(encoding="utf-8")))
    found.append(walk_of(SPARK.name, SPARK.read_text(encoding="utf-8")))
    return [walk for walk in found if walk.blocks]


def known_commands() -> set[str]:
    return set(Subcommands().list_commands(None))


# -- walks -------------------------------------------------------------------------------------------------------------


class Server(NamedTuple):
    data: Path
    ports: Ports


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1",
        "HEAPLINE_BROKER": '{"spare_segment_bytes": 0}',
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "heapline",
        "serve",
        "--data",
        "data",
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    reported = re.search(rb"Heapline on port (\d+), gRPC on port \d+, HTTP on port (\d+)", process.stdout.readline())
    assert reported, (directory / "log").read_text()
    yield Server(directory / "data", Ports(int(reported[1]), int(reported[2])))
    process.kill()
    process.communicate()


def free_ports() -> Ports:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return Ports(*(s.getsockname()[1] for s in taken))


def emptied(server: Server) -> None:
    """A walk begins with an empty server."""

    async def delete_all() -> None:
        async with heapline.connect(f"localhost:{server.ports.native}") as hl:
            for info in await hl.list_topics():
                await hl.delete_topic(info.name)

    asyncio.run(delete_all())


def walk_parameters() -> list[object]:
    """Shell blocks start processes, which takes seconds; so do Spark's."""

    def marks(walk: Walk) -> list[pytest.MarkDecorator]:
        if walk.page == SPARK.name:
            return [pytest.mark.slow, pytest.mark.spark]
        return [pytest.mark.slow] if any(b.is_run and b.language == "sh" for b in walk.blocks) else []

    return [pytest.param(walk, id=walk.page, marks=marks(walk)) for walk in walks()]


@pytest.mark.parametrize("walk", walk_parameters())
def test_walkthrough_runs_as_written(
    walk: Walk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if shutil.which("curl") is None and any("curl " in block.body for block in walk.blocks):
        pytest.skip("this walk uses curl")
    if walk.page == SPARK.name:
        pytest.importorskip("pyspark")
    monkeypatch.chdir(tmp_path)
    ports = free_ports()
    if walk.ground == "server":
        found: Server = request.getfixturevalue("server")
        ports = found.ports
        (tmp_path / "data").symlink_to(found.data)
        emptied(found)
    with Reader(tmp_path, ports) as reader:
        for name, value in reader.environment.items():
            monkeypatch.setenv(name, value)
        reader.follow(walk.page, walk.blocks, known_commands())


def commands_of_the_docs() -> list[str]:
    return sorted({command for walk in walks() for block in walk.blocks for command in block.commands()})


@pytest.mark.parametrize("command", commands_of_the_docs())
def test_documented_command_exists(command: str) -> None:
    """Blocks with a command that does not exist yet are excluded from their walk; this test reports them."""
    if command not in known_commands():
        pytest.skip(f"`heapline {command}` does not exist yet")
    assert command in SUBCOMMANDS


def test_every_block_is_run_or_has_a_reason_not_to() -> None:
    for walk in walks():
        before: Block | None = None
        for block in walk.blocks:
            follows = block.language == "text" and before is not None and (before.is_run or before.reason is not None)
            is_treated = block.is_run or block.file is not None or block.reason is not None or follows
            assert is_treated, f"{walk.page}:{block.line}: name a file, run it, or say why not"
            before = block


def test_block_that_is_a_file_begins_with_its_name() -> None:
    """Websites hide what follows the language of a fence, so a reader sees the name only in a comment."""
    files = [(walk.page, block) for walk in walks() for block in walk.blocks if block.file is not None]
    assert files
    assert [f"{page}:{block.line}" for page, block in files if not block.body.startswith(f"# {block.file}\n")] == []


def test_units_of_the_guide_name_flags_that_exist() -> None:
    """Blocks that need systemd or a cluster at least use flags that exist."""
    walk = next(walk for walk in walks() if walk.page == "guide/operations.md")
    units = {block.file: block.body for block in walk.blocks if block.language in ("ini", "yaml")}
    pod = yaml.safe_load(units["worker.yaml"])["spec"]["template"]["spec"]
    (started,) = re.findall(r"^ExecStart=\S+/(heapline .+)$", units["heapline-worker.service"], re.MULTILINE)
    command = Subcommands().get_command(None, "worker")
    for words in (started.split(), pod["containers"][0]["command"]):
        assert words[:2] == ["heapline", "worker"]
        options = command.make_context("worker", words[2:]).params
        assert options["app"] == "shop.tasks:app"
        assert options["grace"] < pod["terminationGracePeriodSeconds"]
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", units["heapline-worker.service"], re.MULTILINE)
    assert options["grace"] < int(stop)


def test_readme_and_every_page_of_the_guide_show_code() -> None:
    pages = {walk.page for walk in walks() if any(block.is_run for block in walk.blocks)}
    assert any(page.startswith("README") for page in pages)
    assert {f"guide/{path.name}" for path in GUIDE.glob("*.md")} - pages <= {"guide/index.md"}


# -- links -------------------------------------------------------------------------------------------------------------


def linking_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", linking_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), f"{path.name}: {link}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{path.name}: {link}"


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_index_of_the_guide_links_to_every_page() -> None:
    linked = set(LINK.findall((GUIDE / "index.md").read_text(encoding="utf-8")))
    assert {path.name for path in GUIDE.glob("*.md")} - {"index.md"} <= linked


# -- single pieces -----------------------------------------------------------------------------------------------------


def pieces() -> list[object]:
    found = []
    for path in sorted(set((ROOT / "docs").glob("*.md")) - {SPARK}):
        for block in blocks_of(path.read_text(encoding="utf-8")):
            if block.language == "python":
                found.append(pytest.param(path.name, block, id=f"{path.name}:{block.line}"))
    return found


@pytest.mark.parametrize(("page", "block"), pieces())
def test_documented_code_runs(page: str, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Reader(tmp_path, Ports(1, 1)) as reader:
        reader.follow(page, [block], set())


# -- the reader itself -------------------------------------------------------------------------------------------------


def follow(text: str, directory: Path, known: set[str] | None = None) -> list[str]:
    with Reader(directory, Ports(1, 2)) as reader:
        return reader.follow("page.md", blocks_of(text), known or set())


def test_blocks_are_parsed_with_language_file_and_reason() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run: asks -->\n```python\ny\n```\n```sh\nz\n```\n```python a.py\n```\n"
    assert blocks_of(text) == [
        Block("python", None, "x = 1\n", 3, None), Block("python", None, "y\n", 7, "asks"),
        Block("sh", None, "z\n", 10, None), Block("python", "a.py", "", 13, None),
    ]  # fmt: skip


def test_block_may_await_and_its_failure_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        follow("\n\n```python\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0\n```\n", tmp_path)
    assert caught.traceback[-1].lineno == 5  # counted from 0


def test_blocks_of_a_walk_share_names_files_and_one_shell(tmp_path: Path) -> None:
    text = """
```python my_tasks.py
x = 7
```
```python
import my_tasks
y = my_tasks.x
```
```python
print(y)
```
```text
7
```
```sh
mine=5
```
```sh
echo $mine localhost:7400; python -c 'import my_tasks; print(my_tasks.x)'
```
```text
5 localhost:1
7
```
"""
    assert follow(text, tmp_path) == []


def test_failing_shell_or_other_output_fails_the_walk(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page.md:2 does not work:\nso far"):
        follow("```sh\necho so far; false\necho on\n```\n", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(AssertionError, match=r"page.md:5 shows this, but got:\n1"):
        follow("```sh\necho 1\n```\n```text\n2\n```\n", other)


def test_block_with_a_missing_command_is_skipped(tmp_path: Path) -> None:
    text = "```sh\nheapline serve\n```\n```text\nno\n```\n```sh\ntouch after\n```\n"
    assert follow(text, tmp_path) == ["serve"]
    assert (tmp_path / "after").exists()


def test_output_is_compared_with_the_document() -> None:
    assert fits("a … c\n…\nz\n", "a b c\n1\n2\nz\n")
    assert not fits("a\n", "a\nb\n")
    assert not fits("a b\n", "a c\n")
