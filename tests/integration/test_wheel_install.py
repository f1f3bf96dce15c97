"""The built wheel, installed without extras in a separate environment, is complete and lean."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hatch_build
from heapline.assign import Config

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

#: Modules that `import heapline` must not load.
HEAVY = ("typer", "rich", "pydantic", "grpc", "pyspark", "pyarrow", "pandas", "nats", "asyncpg", "redis", "pytest")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    return completed(*command, cwd=cwd, **variables).stdout


def completed(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # The new environment must not find the checkout's modules.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= variables
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("heapline-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a new environment with the wheel and its base dependencies."""
    home = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", home / "venv", cwd=home)
    bin_ = home / "venv" / "bin"
    quiet = ("--quiet", "--disable-pip-version-check")
    run(bin_ / "python", "-m", "pip", *quiet, "install", "--constraint", ROOT / "constraints.txt", wheel, cwd=home)
    return bin_


def test_wheel_contains_only_the_package_its_marker_and_its_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "heapline/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert sources <= set(names)
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"heapline", "heapline_pytest.py", "pyspark_heapline"}
    assert [name for name in names if name.endswith(".pyc")] == []
    [reported] = [name for name in names if name.endswith("entry_points.txt")]
    assert b"[pytest11]\nheapline_pytest = heapline_pytest" in zipfile.ZipFile(wheel).read(reported)


def test_example_configs_of_assign_are_in_the_wheel(wheel: Path) -> None:
    held = zipfile.ZipFile(wheel)
    for name in ("development", "production", "high_churn"):
        inside = held.read(f"heapline/assign/examples/{name}.yaml").decode()
        assert Config.from_yaml(inside) == Config.example(name)


def test_import_works_without_extras_and_loads_nothing_heavy(installed: Path, tmp_path: Path) -> None:
    program = (
        "import sys, heapline; print(heapline.__file__); print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    where, loaded = run(installed / "python", "-c", program, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed.parent)
    assert set(HEAVY) & set(loaded.split()) == set()


def test_every_public_name_can_be_imported(installed: Path, tmp_path: Path) -> None:
    program = "import heapline; [getattr(heapline, name) for name in heapline.__all__]; print(len(heapline.__all__))"
    assert int(run(installed / "python", "-c", program, cwd=tmp_path)) > 0


def test_command_is_installed(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "heapline", "--version", cwd=tmp_path).startswith("heapline ")


LIFECYCLE = """
import heapline, sys
from heapline import accelerator
with heapline.open_sync(sys.argv[1]) as hl:
    hl.create_topic("jobs")
    hl.enqueue("jobs", b"hello", key="k")
    [message] = hl.pop("jobs")
    message.ack()
print(message.payload.decode(), message.key, accelerator.description())
"""


def test_wheel_built_with_a_compiler_has_the_accelerator(wheel: Path, installed: Path, tmp_path: Path) -> None:
    try:
        hatch_build.compile_extension(ROOT / hatch_build.SOURCE, tmp_path / "trial.so")
    except hatch_build.NotBuilt as error:
        pytest.skip(f"the accelerator cannot be built here: {error}")
    assert wheel.name.endswith(f"-{hatch_build.wheel_tag()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "heapline/_accelerator.abi3.so" in names
    assert "heapline/_accelerator.c" not in names
    assert "\naccelerator: on (checksums: " in run(installed / "heapline", "--version", cwd=tmp_path)
    assert run(installed / "python", "-c", LIFECYCLE, "data", cwd=tmp_path).startswith("hello k on (")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("heapline-*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(out, filter="data")
    (unpacked,) = (path for path in out.glob("heapline-*") if path.is_dir())
    return unpacked


def test_source_distribution_has_the_c_source_and_no_binary(sdist: Path) -> None:
    assert (sdist / hatch_build.SOURCE).is_file()
    assert list(sdist.rglob("*.so")) == []


def test_wheel_built_without_a_compiler_is_pure_and_works(sdist: Path, tmp_path: Path) -> None:
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, sdist)
    done = completed(*build, cwd=tmp_path, CC="no-such-compiler")
    [notice] = [line for line in done.stderr.splitlines() if "accelerator" in line]
    assert notice.startswith("accelerator not built: no C compiler found (no-such-compiler); ")
    (wheel,) = tmp_path.glob("heapline-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".c"))] == []
    target = tmp_path / "pure"
    run(sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    lifecycle = run(sys.executable, "-c", LIFECYCLE, "data", cwd=tmp_path, PYTHONPATH=str(target))
    assert lifecycle.startswith("hello k off (not built")
    version = run(sys.executable, "-m", "heapline", "--version", cwd=tmp_path, PYTHONPATH=str(target))
    assert "\naccelerator: off (not built" in version


def test_client_connects_without_extras(installed: Path, tmp_path: Path) -> None:
    program = (
        "import heapline\n"
        "try: heapline.connect_sync('127.0.0.1:1', api_key='hl_key', deadline=0.2).list_topics()\n"
        "except heapline.DeadlineExceeded as error: print(error)"
    )
    assert "could not connect to 127.0.0.1:1" in run(installed / "python", "-c", program, cwd=tmp_path)
