"""The server of server_rig.py, called over plain HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.integration.server_rig import Rig


class HttpRig(Rig):
    async def start(self) -> None:
        await super().start()
        self.http = httpx.AsyncClient(base_url=self.url, timeout=30, verify=False, trust_env=False)

    async def stop(self) -> None:
        await self.http.aclose()
        await super().stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.http.post(f"/v1/{path}", json=body, **more)

    async def get(self, path: str, **query: Any) -> httpx.Response:
        return await self.http.get(f"/v1/{path}", params=query)

    async def heap(self, topic: str = "jobs", **settings: Any) -> None:
        assert (await self.post("heaps", {"topic": topic, **self.small, **settings})).status_code == 201

    async def raw(self, data: bytes, ends: bool = False) -> bytes:
        """Send exactly these bytes; return the response until the connection closes or is silent for a while."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.http_port)
        try:
            writer.write(data)
            await writer.drain()
            if ends:
                writer.write_eof()
            said = b""
            while chunk := await asyncio.wait_for(reader.read(1 << 16), 20):
                said += chunk
                if not ends and b"\r\n\r\n" in said:
                    break
            return said
        except ConnectionError:
            return b""
        finally:
            writer.close()
