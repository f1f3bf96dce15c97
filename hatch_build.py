"""Build hook: compile proto/ to descriptors, which wire/descriptors.py turns into classes at run time.

Generated Python code runs with only one release of protobuf; every release reads descriptors. Linters also need no
exceptions for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO = "heapline/v1/heapline.proto"
BUILT = "src/heapline/wire/heapline.binpb"


class ProtoBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs for wheels, editable installs and source distributions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_proto(Path(self.root))
        build_data["artifacts"].append(BUILT)


def compile_proto(root: Path) -> None:
    from grpc_tools import protoc  # only the build needs it

    source, target = root / "proto", root / BUILT
    arguments = ["protoc", f"--proto_path={source}", "--include_imports", f"--descriptor_set_out={target}", PROTO]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc cannot compile {source / PROTO}; see its messages above")
