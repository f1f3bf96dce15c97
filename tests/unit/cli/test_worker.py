"""`heapline worker`: errors at startup, and detection of changed source files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heapline.cli import main
from heapline.cli.worker import SourceWatch

runner = CliRunner()
APP = """
import heapline
app = heapline.App("./data")
number = 5

@app.task(topic="mail")
def send() -> None: ...
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("shop_tasks", "shop_broken", "shop_empty"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "shop_tasks.py").write_text(APP)
    (tmp_path / "shop_broken.py").write_text("import no_such_package\n")
    (tmp_path / "shop_empty.py").write_text("import heapline\napp = heapline.App('./data')\n")
    return tmp_path


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shop_tasks"], "'shop_tasks' is not an app; use module:name, such as proj.tasks:app"),
        (["nowhere.tasks:app"], "module 'nowhere' cannot be imported; run the command in the directory that contains"),
        (["shop_tasks:nothing"], "module 'shop_tasks' has no 'nothing'"),
        (["shop_tasks:number"], "'shop_tasks:number' is a int, not a heapline.App"),
        (["shop_empty:app"], "this app has no tasks"),
        (["shop_tasks:app", "--topics", "male"], "no task of this app is on topic 'male'; its topics are mail"),
        (["shop_tasks:app", "--concurrency", "0"], "concurrency must be an integer from 1 to 10000, got 0"),
        (["shop_tasks:app", "--processes", "2"], "which several processes cannot share; run `heapline serve`"),
    ],
)
def test_worker_that_cannot_start_says_why(arguments: list[str], words: str) -> None:
    result = runner.invoke(main.app, ["worker", *arguments])
    assert result.exit_code == 1
    assert words in result.output


@pytest.mark.usefixtures("project")
def test_missing_package_of_the_app_raises_its_own_error() -> None:
    result = runner.invoke(main.app, ["worker", "shop_broken:app"])
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "no_such_package"


@pytest.mark.usefixtures("project")
def test_os_error_of_the_app_keeps_its_traceback(project: Path) -> None:
    (project / "shop_config.py").write_text("open('no such file')\n")
    result = runner.invoke(main.app, ["worker", "shop_config:app"])
    assert isinstance(result.exception, ImportError)
    assert isinstance(result.exception.__cause__, FileNotFoundError)


def test_source_watch_sees_new_changed_and_removed_files(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    source = tmp_path / "pkg" / "a.py"
    source.write_text("1")
    watch = SourceWatch(tmp_path)
    assert watch.changed() is None
    os.utime(source, ns=(1, 1))
    assert watch.changed() == "pkg/a.py"
    assert watch.changed() is None
    (tmp_path / "b.py").write_text("")
    assert watch.changed() == "b.py"
    source.unlink()
    assert watch.changed() == "pkg/a.py"


def test_source_watch_ignores_other_files_and_directories(tmp_path: Path) -> None:
    watch = SourceWatch(tmp_path)
    for directory in (".venv", "node_modules", "__pycache__"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "x.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert watch.changed() is None
