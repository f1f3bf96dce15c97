"""The pytest plugin as users have it: loaded by pytest, in separate runs."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from heapline import testing

PLAIN = """
    from heapline.testing import assert_enqueued, drain_sync

    def test_one(heapline_sync_broker, heapline_clock):
        heapline_sync_broker.create_topic("jobs")
        heapline_sync_broker.enqueue("jobs", b"x", delay=60)
        assert drain_sync(heapline_sync_broker, print) == []
        heapline_clock.advance(60)
        assert len(drain_sync(heapline_sync_broker, print)) == 1

    def test_next_one_starts_empty(heapline_sync_broker):
        assert heapline_sync_broker.list_topics() == []
"""
ASYNC = """
    import pytest
    from heapline.testing import assert_enqueued, drain

    {mark}
    async def test_one(heapline_broker, heapline_clock):
        await heapline_broker.create_topic("jobs")
        await heapline_broker.enqueue("jobs", b"x", delay=60)
        await heapline_broker.enqueue("jobs", b"y", delay=600)
        heapline_clock.advance(60)
        assert [done.payload for done in await drain(heapline_broker, print)] == [b"x"]

    {mark}
    async def test_next_one_starts_empty(heapline_broker):
        assert await heapline_broker.list_topics() == []
"""
SHARED_LOOP = """
    import pytest
    pytestmark = pytest.mark.asyncio(loop_scope="module")

    @pytest.mark.parametrize("n", range(3))
    async def test_one(heapline_broker, n):
        await heapline_broker.create_topic("jobs")
        await heapline_broker.enqueue("jobs", b"x", delay=60)
"""
ANYIO = "@pytest.mark.anyio\n    @pytest.mark.parametrize('anyio_backend', ['asyncio'])"
MODULES = """
    import sys

    def test_nothing_heavy_is_loaded():
        assert "heapline_pytest" in sys.modules
        assert not {"heapline", "numpy", "msgspec"} & set(sys.modules)
"""
AUTO = ["-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
STRICT = [*AUTO[:3], "asyncio_mode=strict", *AUTO[4:]]
SOURCE = Path(testing.__file__).parents[2]


def run_pytest(tmp_path: Path, source: str, *options: str) -> str:
    """Run pytest in a new process with the plugin and only the named others; return its output."""
    (tmp_path / "test_it.py").write_text(textwrap.dedent(source))
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(SOURCE)}
    plugins = ["-p", "heapline_pytest", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *options, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (PLAIN, []),
        (ASYNC.format(mark=""), AUTO),
        (ASYNC.format(mark="@pytest.mark.asyncio"), STRICT),
        (ASYNC.format(mark=ANYIO), ["-p", "anyio.pytest_plugin"]),
        (SHARED_LOOP, STRICT),
        (MODULES, []),
    ],
    ids=["plain", "asyncio-auto", "asyncio-strict", "anyio", "loop-of-a-module", "cheap-to-load"],
)
def test_plugin_serves(tmp_path: Path, source: str, options: list[str]) -> None:
    assert "passed" in run_pytest(tmp_path, source, *options)


def test_examples_of_the_package_run(tmp_path: Path) -> None:
    examples = [example.source for example in doctest.DocTestParser().get_examples(testing.__doc__ or "")]
    assert len(examples) == 2
    source = "from heapline.testing import assert_enqueued, drain, drain_sync\n\n" + "\n".join(examples)
    assert "2 passed" in run_pytest(tmp_path, source, *AUTO)
