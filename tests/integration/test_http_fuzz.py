"""Garbage on the HTTP port: requests generated from the OpenAPI document and against it, and malformed bytes.

No answer is a 500, the document lists every answer, no internals of the server are disclosed, and what was
refused has changed nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from heapline.server.protocols.pages import document as make_document
from tests.conformance.worlds import picture
from tests.integration.http_rig import HttpRig

EXAMPLES = 12  # a route; the soak tries many more
CHECKED = [
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection",
]  # fmt: skip
NEEDED = {
    "topic", "messages", "batch_id", "part", "parts", "message_id", "lease_token", "leases", "producer_id", "seconds",
    "partition", "force", "email", "key_id", "name", "cron", "payload", "payload_text", "payload_json",
    "group", "member", "session", "rows", "to", "checkpoint", "positions",
}  # fmt: skip
INSIDE = re.compile(r"Traceback|File \"|\.py\b|site-packages|msgspec|pydantic|starlette|asyncio|object at 0x|/tmp/")


class Served:
    """A server on its own loop and thread: schemathesis calls from this one, and does not wait for a loop."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.rig = HttpRig(directory)
        self.known: list[tuple[str, str]] = []  # ids and tokens of existing messages
        self.run(self._start())
        self.document = self.run(self._document())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _start(self) -> None:
        await self.rig.start()
        await self.fresh()

    async def _document(self) -> Any:
        return (await self.rig.http.get("/openapi.json")).json()

    async def fresh(self) -> None:
        """A heap with one message in each state, even after the last request changed it."""
        behind = self.rig.behind
        for info in await behind.list_topics():
            await behind.delete_topic(info.name)
        for schedule in await behind.list_schedules():
            await behind.delete_schedule(schedule.name)
        await behind.create_topic("jobs", **self.rig.small, backoff={"base": 0.0})
        await behind.create_schedule("nightly", cron="0 3 * * *", topic="jobs")
        ready = [await behind.enqueue("jobs", b"x", priority=-1) for _ in range(4)][-1]
        dead, held = await behind.pop("jobs", 2)
        await behind.bury(dead)
        delayed = await behind.enqueue("jobs", b"x", delay=3600)
        self.known = [(held.message_id, str(held.token)), (dead.message_id, "1"), (str(ready.id), "2"),
                      (delayed.message_id, "3")]  # fmt: skip

    def stop(self) -> None:
        self.run(self.rig.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("fuzz"))
    yield served
    served.stop()


def _tamed(document: Any) -> Any:
    """Avoid pops that wait, which would take too long. This server requires no credential."""
    document = json.loads(json.dumps(document)) | {"security": []}
    document["components"]["schemas"]["Pop"]["properties"]["wait"] = {"type": "number", "minimum": 0, "maximum": 0}
    return document


def _operations() -> list[tuple[str, str]]:
    """Computed before a server exists, so that every route is a separate test."""
    document = make_document()
    return [(method, path) for path, found in document["paths"].items() for method in found if path.startswith("/v1/")]


def _fuzz(served: Served, method: str, path: str, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(_tamed(served.document))
    schema.config.update(base_url=served.rig.url)
    operation = schema[path][method.upper()]
    checks = CHECKS.get_by_names(CHECKED)
    session = requests.Session()
    cases = operation.as_strategy(GenerationMode.POSITIVE) | operation.as_strategy(GenerationMode.NEGATIVE)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=cases, there=st.booleans(), chance=st.randoms(use_true_random=False))
    def run(case: Any, there: bool, chance: Random) -> None:
        if there:
            _aim(case, served, chance)
        before = served.run(_all_there_is(served))
        response = case.call(session=session, timeout=30)
        # A case aimed at what exists may be valid after all.
        wanted = checks[: -1 if there else None]
        if response.status_code == 501:
            assert response.json()["facts"]["feature"] not in served.rig.behind.features
            wanted = wanted[1:]
        case.validate_response(response, checks=wanted)
        assert not INSIDE.search(response.text), response.text
        if (response.status_code >= 400 or method == "get") and not _settled_some(case, response):
            assert served.run(_all_there_is(served)) == before
        else:
            served.run(served.fresh())

    run()


def _settled_some(case: Any, response: Any) -> bool:
    """A call on several leases reports those that were lost, and settles the others."""
    leases = case.body.get("leases") if isinstance(case.body, dict) else None
    if response.status_code != 409 or not leases:
        return False
    return len(response.json()["facts"]["lost"]) < len(leases)


def _aim(case: Any, served: Served, chance: Random) -> None:
    """Use existing heaps and messages, with fewer options at a time: otherwise few requests get past their names."""
    body = case.body if isinstance(case.body, dict) else {}
    rows = [row for name in ("messages", "leases") if isinstance(body.get(name), list) for row in body[name]]
    for place in (case.path_parameters, case.query, body, *rows):
        if not isinstance(place, dict):
            continue
        for name in [name for name in place if name not in NEEDED and chance.random() < 0.7]:
            del place[name]
        id, token = chance.choice(served.known)
        real = {"topic": "jobs", "message_id": id, "lease_token": token, "producer_id": "p", "force": True,
                "name": "nightly", "cron": "@daily"}  # fmt: skip
        place.update({name: value for name, value in real.items() if name in place})
        if place.keys() & {"payload", "payload_json"}:
            place.pop("payload", None)
            place.pop("payload_json", None)
            place["payload_text"] = "x"
    if "message_id" in body or "lease_token" in body:
        body.pop("leases", None)


async def _all_there_is(served: Served) -> Any:
    behind = served.rig.behind
    heaps = [(info, await picture(behind, info.name)) for info in await behind.list_topics()]
    return heaps, await behind.list_batches(), await behind.list_schedules()


@pytest.mark.parametrize(("method", "path"), _operations())
def test_requests_generated_from_openapi_and_against_it(served: Served, method: str, path: str) -> None:
    _fuzz(served, method, path, EXAMPLES)


@pytest.mark.soak
@pytest.mark.parametrize(("method", "path"), _operations())
def test_many_more_requests_generated_from_openapi_and_against_it(served: Served, method: str, path: str) -> None:
    _fuzz(served, method, path, 400)


# -- malformed bytes ---------------------------------------------------------------------------------------------------

HEAD = b"POST /v1/enqueue HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"topic": "jobs", "payload_text": "x"}'
BOMB = gzip.compress(b'{"topic": "jobs", "payload_text": "' + b"x" * (8 << 20) + b'"}')
GARBAGE = {
    "nothing": b"",
    "half a line": b"POST /v1/enq",
    "half a head": HEAD[:-30],
    "half a body": HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:-5],
    "half a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nff\r\n" + BODY,
    "bad chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: 38\r\n\r\n" + BODY,
    "length and chunks": HEAD + b"content-length: 38\r\ntransfer-encoding: chunked\r\n\r\n" + BODY,
    "negative length": HEAD + b"content-length: -1\r\n\r\n" + BODY,
    "huge length": HEAD + b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    "huge header": HEAD + b"x: " + b"y" * (1 << 20) + b"\r\n\r\n" + BODY,
    "many headers": HEAD + b"".join(b"x%d: y\r\n" % i for i in range(20_000)) + b"\r\n" + BODY,
    "huge path": b"GET /" + b"y" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "path that is not text": b"GET /v1/heaps/\xff%ff%00 HTTP/1.1\r\nhost: x\r\n\r\n",
    "header that is not text": HEAD + b"x-correlation-id: \xff\r\ncontent-length: 2\r\n\r\n{}",
    "unknown method": b"BREW /v1/enqueue HTTP/1.1\r\nhost: x\r\n\r\n",
    "unknown version": b"GET /v1/heaps HTTP/7.7\r\nhost: x\r\n\r\n",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(150),
    "noise": bytes(range(256)) * 64,
    "gzip bomb": HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB) + BOMB,
    "deep JSON": HEAD + b"content-length: 200000\r\n\r\n" + b"[" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(GARBAGE))
def test_malformed_requests_change_nothing(served: Served, name: str) -> None:
    before = served.run(_all_there_is(served))
    said = served.run(served.rig.raw(GARBAGE[name], ends=True))
    if said:
        assert re.match(rb"HTTP/1\.1 4\d\d ", said), said[:200]
    assert not INSIDE.search(said.decode("latin-1")), said[:500]
    assert served.run(_all_there_is(served)) == before
    assert requests.get(f"{served.rig.url}/healthz", timeout=10).text == "ok\n"
