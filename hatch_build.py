"""What the build makes: the descriptors of proto/, which wire/schema.py turns into classes at run time.

Descriptors instead of generated Python, because that runs with one release of protobuf only, while these are read by
all of them; and because nothing generated then needs to be kept from linters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO = "heapline/v1/heapline.proto"
MADE = "src/heapline/wire/heapline.binpb"


class ProtoBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs for wheels, editable installs and source distributions alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        make(Path(self.root))
        build_data["artifacts"].append(MADE)


def make(root: Path) -> None:
    from grpc_tools import protoc  # only the build needs it

    source, target = root / "proto", root / MADE
    arguments = ["protoc", f"--proto_path={source}", "--include_imports", f"--descriptor_set_out={target}", PROTO]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc does not take {source / PROTO}: see above")
