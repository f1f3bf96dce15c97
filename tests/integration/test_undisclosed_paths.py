"""Errors never contain the paths of the server's files, whether data is corrupt or the disk full or failing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from heapline.contract.errors import TopicReloading
from heapline.wire.descriptors import METHODS, pb
from heapline.wire.error_codes import METADATA
from tests.integration.guarded_rig import GuardedRig
from tests.integration.server_rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GuardedRig]:
    home = tmp_path / "a home with spaces"
    home.mkdir()
    async with GuardedRig(home) as rig:
        yield rig


async def error_over_grpc(rig: GuardedRig, name: str, request: Any) -> tuple[str, str]:
    """Return the code, and every byte that a client receives."""
    method = METHODS[name]
    async with grpc.aio.insecure_channel(rig.grpc_target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method.path)(
                request.SerializeToString(), metadata=(("authorization", rig.admin_key),)
            )
    error = caught.value
    facts = dict(error.trailing_metadata() or ())[METADATA]
    return error.code().name, f"{error.details()} {facts!r}"


def refuse_paths(rig: GuardedRig, text: str) -> None:
    for part in (str(rig.directory), str(rig.directory.parent), "home with spaces", ".py"):
        assert part not in text


async def test_error_for_a_corrupt_journal_hides_its_path(rig: GuardedRig) -> None:
    await rig.behind.enqueue("jobs", b"x" * 100)
    await Rig.stop(rig)
    files = [p for p in rig.directory.glob("topics/default/jobs*/**/*") if p.is_file()]
    segment = max(files, key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(0)
        file.write(b"\xff" * 64)
    await Rig.start(rig)
    code, text = await error_over_grpc(rig, "Stats", pb.StatsRequest(topic="jobs"))
    assert code == "DATA_LOSS"
    assert "default/jobs" in text  # the error names the topic
    refuse_paths(rig, text)


async def test_error_for_corrupt_keys_hides_their_path(rig: GuardedRig) -> None:
    (rig.directory / "auth.json").write_bytes(b"{}")
    rig.auth_clock.advance(2)
    code, text = await error_over_grpc(rig, "ListHeaps", pb.ListHeapsRequest())
    assert code == "DATA_LOSS"
    refuse_paths(rig, text)
    response = await rig.ask("GET", "/v1/heaps")
    assert response.status_code == 500
    refuse_paths(rig, response.text)


async def test_error_for_a_failing_disk_hides_its_path(rig: GuardedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = str(rig.directory / "topics/default/jobs.1/segments/1.seg")
    error = OSError(5, "Input/output error", segment)

    async def fail(*_: Any, **__: Any) -> Any:
        raise TopicReloading("jobs", str(error))

    monkeypatch.setattr(rig.behind, "do", fail)
    code, text = await error_over_grpc(rig, "Stats", pb.StatsRequest(topic="jobs"))
    assert code == "UNAVAILABLE"
    assert "Input/output error" in text
    refuse_paths(rig, text)
