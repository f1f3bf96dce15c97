"""The commands and settings in docs/mqueue.md work as written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from heapline.server.auth.secret import Secret
from heapline.server.settings import read_settings
from tests.acceptance.pages import blocks_of
from tests.integration.mqueue_rig import ALICE, MQueueRig
from tests.unit.server.auth.rig import PASSWORD

TEXT = (Path(__file__).parents[2] / "docs" / "mqueue.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (found,) = [block.body for block in blocks_of(TEXT) if block.language == kind]
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands are curl's")
async def test_commands_enqueue_lease_ack_and_nack(tmp_path: Path) -> None:
    async with MQueueRig(tmp_path) as rig:
        token = await rig.directory_guard.login(ALICE, Secret(PASSWORD))
        shell = await asyncio.create_subprocess_exec(
            "sh", "-e", "-c", block("sh"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "URL": str(rig.http.base_url), "TOKEN": token.reveal(), "no_proxy": "*"},
        )  # fmt: skip
        out, err = await asyncio.wait_for(shell.communicate(), 30)
        assert shell.returncode == 0, (out, err)
        assert len(json.loads(out.split(b"]")[0] + b"]")) == 2
        assert await rig.counts() == (0, 1, 0, 0)  # one acked, one nacked


def test_documented_settings_exist(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text(block("yaml"))
    rules = read_settings(tmp_path / "server.yaml").mqueue_rules()
    assert (rules.rate, rules.burst, rules.rates) == (100, 2, {"payments": 1000, "internal": 0})


def test_every_setting_is_documented_with_its_default() -> None:
    settings = read_settings()
    named = set(re.findall(r"`(mqueue_\w+)", TEXT))
    assert named == {name for name in type(settings).__struct_fields__ if name.startswith("mqueue_")}
    assert f"`mqueue_topics_per_namespace_max` ({settings.mqueue_topics_per_namespace_max})" in " ".join(TEXT.split())
    assert f"`mqueue_topics_max` ({settings.mqueue_topics_max})" in TEXT
