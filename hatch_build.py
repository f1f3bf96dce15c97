"""Build hook: compile proto/ to descriptors and, where a C compiler is found, the accelerator to an extension.

Descriptors: wire/descriptors.py turns them into classes at run time. Generated Python code runs with only one release
of protobuf; every release reads descriptors. Linters also need no exceptions for them.

Accelerator: `src/heapline/_accelerator.c` against Python's stable ABI, so one wheel per platform serves every Python
from 3.11 on. Without a compiler or Python's headers the build says so in one line and makes a pure wheel, which has the
same functions in Python. `HEAPLINE_ACCELERATOR=off` does the same on request. To compile it in a checkout without
installing: `python hatch_build.py`.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PROTO = "heapline/v1/heapline.proto"
DESCRIPTORS = "src/heapline/wire/heapline.binpb"
SOURCE = "src/heapline/_accelerator.c"
EXTENSION = "src/heapline/_accelerator.abi3.so"
#: The oldest Python that the extension runs on; the same as Py_LIMITED_API in the source.
STABLE_ABI = "cp311-abi3"
FLAGS = ["-O2", "-std=c11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]


class NotBuilt(Exception):
    """The extension cannot be built here; the message says why."""


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


if __name__ == "__main__":
    try:
        print(f"built {compile_accelerator(Path(__file__).parent)}")
    except NotBuilt as error:
        sys.exit(f"accelerator not built: {error}")
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class HeaplineBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """Runs for wheels, editable installs and source distributions. Only the last contain no extension."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            root = Path(self.root)
            compile_proto(root)
            build_data["artifacts"].append(DESCRIPTORS)
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
