"""Nodes of the Postgres broker as real processes, and clients of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

import heapline
from tests.integration.server_process import Process
from tests.postgres import shared_url


def sql_node(data: Path, schema: str, *urls: str, port: int = 0, **settings: object) -> Process:
    """A node on these databases. Nodes with the same schema share their topics."""
    data.parent.mkdir(parents=True, exist_ok=True)
    config = data.with_suffix(".yaml")
    lines = [f"broker: {{schema: {schema}}}", *(f"{name}: {value}" for name, value in settings.items())]
    config.write_text("\n".join(lines) + "\n")
    flags = [flag for url in urls or (shared_url(),) for flag in ("--postgres", url)]
    return Process(data, "--broker", "sql", "--config", str(config), "--port", str(port), *flags)


def admin_key(data: Path) -> str:
    return (data / "admin.key").read_text().strip()


def connect(node: Process, data: Path) -> heapline.Broker:
    """A client with the administrator's key from this directory."""
    return heapline.connect(node.target, api_key=admin_key(data), deadline=20.0)


@asynccontextmanager
async def http(node: Process, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", headers=headers, timeout=30) as client:
        yield client


async def until(client: httpx.AsyncClient, page: str, holds: Callable[[httpx.Response], bool]) -> httpx.Response:
    """Read a page until it satisfies `holds`."""
    async with asyncio.timeout(30):
        while not holds(answer := await client.get(page)):  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.05)
    return answer
