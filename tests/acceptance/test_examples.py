"""The programs in examples/ run as they stand, in an empty directory, and say what they should."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.nats_rig import Servers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SAID = {
    "plain.py": ["put out the fire", "write the report", "water the plants"],
    "outbox_sqlalchemy.py": ["the card was declined", "relayed: 1", "bill order 1 (tea)"],
    "django_outbox.py": ["thanks for the tea", "not paid", "relayed: 1", "bill for the tea"],
}


def run(name: str, directory: Path, *arguments: str) -> list[str]:
    program = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        program, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", SAID)
def test_example_says(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path) == SAID[name]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_fastapi_app_takes_orders_and_packs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_DATA", str(tmp_path / "data"))
    app = load("fastapi_app.py").app
    for items in (["tea", "milk"], ["honey"]):  # the second time on what the first has left
        transport = httpx.ASGITransport(app=app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as web:
            for item in items:
                answer = await web.post("/orders", json={"item": item, "express": item == "milk"})
                assert answer.status_code == 202
                assert len(answer.json()["message_id"]) == 26
            async with asyncio.timeout(30):
                while (stats := (await web.get("/stats")).json()) != {"ready": 0, "packed": len(items)}:
                    assert stats["packed"] <= len(items)
        assert sorted(app.state.packed) == sorted(items)


def test_nats_workers_share_the_work_and_take_over(tmp_path: Path) -> None:
    with Servers(tmp_path / "nats", 1) as servers:
        assert run("nats_workers.py", tmp_path, servers.urls[0]) == [
            "workers: worker-0 worker-1 worker-2",
            "held: 12",
            "morning: 12 messages handled",
            "one has stopped",
            "evening: 12 messages handled",
        ]


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAID, "fastapi_app.py", "nats_workers.py"}
