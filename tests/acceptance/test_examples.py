"""The programs in examples/ run unchanged in an empty directory and print what they should: on their own directory,
and on a server where one is named."""

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
from tests.integration.server_process import Process

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SAID = {
    "plain.py": ["put out the fire", "write the report", "water the plants"],
    "outbox_sqlalchemy.py": ["the card was declined", "relayed: 1", "bill order 1 (tea)"],
    "django_outbox.py": ["not paid", "relayed: 1", "bill for the tea", "thanks for the tea"],
}
ON_A_SERVER = ("outbox_sqlalchemy.py", "django_outbox.py")


def run(name: str, directory: Path, *arguments: str, patience: float = 120, **settings: str) -> list[str]:
    program = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **settings}
    result = subprocess.run(
        program, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=patience
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", SAID)
def test_example_prints_its_expected_output(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path) == SAID[name]


@pytest.mark.slow
async def test_examples_print_the_same_on_a_server(tmp_path: Path) -> None:
    async with Process(tmp_path / "data") as server:
        for name in ON_A_SERVER:
            (tmp_path / name).mkdir()
            settings = {"HEAPLINE_URL": server.target, "HEAPLINE_DATA": str(tmp_path / "data")}
            assert await asyncio.to_thread(run, name, tmp_path / name, **settings) == SAID[name]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the annotations of its tasks are looked up there
    spec.loader.exec_module(module)
    return module


async def test_fastapi_app_takes_orders_and_packs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEAPLINE_URL", raising=False)
    module = load("fastapi_app.py")
    for items in (["tea", "milk"], ["honey"]):  # the second time on the data of the first run
        module.packed.clear()
        transport = httpx.ASGITransport(app=module.web)
        async with (
            module.web.router.lifespan_context(module.web),
            httpx.AsyncClient(transport=transport, base_url="http://x") as web,
        ):
            for item in items:
                answer = await web.post("/orders", json={"item": item, "express": item == "milk"})
                assert answer.status_code == 202
                assert len(answer.json()["message_id"]) == 26
            async with asyncio.timeout(30):
                while (stats := (await web.get("/stats")).json()) != {"ready": 0, "packed": len(items)}:
                    assert stats["packed"] <= len(items)
        assert sorted(module.packed) == sorted(items)


def test_nats_workers_share_the_work_and_take_over(tmp_path: Path) -> None:
    with Servers(tmp_path / "nats", 1) as servers:
        assert run("nats_workers.py", tmp_path, servers.urls[0]) == [
            "workers: worker-0 worker-1 worker-2",
            "held: 12",
            "morning: 12 messages handled",
            "one worker has stopped",
            "evening: 12 messages handled",
        ]


@pytest.mark.slow
@pytest.mark.spark
def test_spark_tour_ends_with_a_report_and_an_audit_that_passes(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    assert run("spark_tour.py", tmp_path, patience=600, HEAPLINE_BROKER='{"spare_segment_bytes": 0}') == [
        "archived: {'events': True, 'messages': True}",
        "messages in the lake: 600",
        "outcomes: {'acked': 568, 'waiting': 20, 'dead': 12}",
        "dead letters: {'no stock': 12}",
        "workers for a wait of a minute: 1",
        "audit: passed, 600 messages",
    ]
    assert "Waits by priority" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_every_example_has_a_test() -> None:
    others = {"fastapi_app.py", "nats_workers.py", "spark_tour.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAID, *others}
