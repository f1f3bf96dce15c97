"""Pages of the HTTP port that are not calls of the contract: health, metrics, login, statistics of all topics, docs.

`/healthz`: the process is alive. `/readyz`: it accepts calls. `/metrics` is for Prometheus. It has the names of all
topics and how much goes through them, so without a key it answers only if the server listens on loopback alone, unless
`metrics_public` says otherwise. `/v1/auth/login` is the one call of /v1 without a credential.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from heapline.contract.call import Page as ResultPage
from heapline.contract.call import Right
from heapline.contract.errors import BadRequest
from heapline.contract.topics import ListTopics, Stats
from heapline.server.auth.secret import Secret
from heapline.server.dispatcher import Dispatcher
from heapline.server.gate import Request
from heapline.server.protocols.exchange import Exchange, TooSlow, read_json
from heapline.server.protocols.http import Page, is_local
from heapline.server.protocols.openapi import Login, Token, docs_page, document
from heapline.server.telemetry.metrics import CONTENT_TYPE, Metrics
from heapline.wire.json import ROUTES

TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
LOGIN_BYTES_MAX = 16 << 10  # email and password, however they are escaped
LOGIN_SECONDS_MAX = 10.0
POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Pages:
    def __init__(
        self, dispatcher: Dispatcher, metrics: Metrics, *, metrics_public: bool | None, on_loopback: bool
    ) -> None:
        self._dispatcher, self._gate, self._metrics = dispatcher, dispatcher.gate, metrics
        self._is_public = bool(metrics_public)
        self._is_local = metrics_public is None and on_loopback
        self._made: dict[str, bytes] = {}  # pages for anyone, which take 10 ms to make: made once

    def routes(self) -> dict[tuple[str, str], Page]:
        return {
            ("GET", "/healthz"): self.health,
            ("GET", "/readyz"): self.ready,
            ("GET", "/metrics"): self.metrics,
            ("POST", "/v1/auth/login"): self.login,
            ("GET", "/v1/stats"): self.stats,
            ("GET", "/docs"): self.docs,
            ("GET", "/openapi.json"): self.openapi,
        }

    async def health(self, exchange: Exchange) -> None:
        await exchange.respond(b"ok\n", content_type=TEXT)

    async def ready(self, exchange: Exchange) -> None:
        if self._gate.stopping.is_set():
            await exchange.respond(b"stopping\n", 503, TEXT)
        else:
            await exchange.respond(b"ok\n", content_type=TEXT)

    async def metrics(self, exchange: Exchange) -> None:
        headers = exchange.headers
        if not (self._is_public or (self._is_local and is_local(headers))):
            credential = headers.get("authorization") or headers.get("x-api-key")
            principal = await self._gate.guard.authenticate(credential)
            principal.check(Right.CONSUME, None)  # on all topics, because it shows all of them
        await exchange.respond(await self._metrics.text(), content_type=CONTENT_TYPE)

    async def login(self, exchange: Exchange) -> None:
        """Log in. Whatever is wrong with email or password, the answer is the same (401)."""
        try:
            async with asyncio.timeout(LOGIN_SECONDS_MAX):
                data = await exchange.json_body(LOGIN_BYTES_MAX)
        except TimeoutError:
            raise TooSlow(f"a login must arrive within {LOGIN_SECONDS_MAX:.0f} seconds") from None
        body = read_json(Login, data)
        log_in = getattr(self._gate.guard, "login", None)
        if log_in is None:
            raise BadRequest("this server has no users; call it without logging in")
        token: Secret = await log_in(body.email, Secret(body.password))
        await exchange.respond(msgspec.json.encode(Token(token.reveal())), headers={"cache-control": "no-store"})

    async def stats(self, exchange: Exchange) -> None:
        """Return the statistics of a topic, or of all topics that the caller may consume from."""
        topic = exchange.query().get("topic", "")
        rpc = Stats.facts.rpc if topic else ListTopics.facts.rpc
        async with Request(self._gate, "http", rpc, exchange.headers, topic=topic) as request:
            query = exchange.query()
            route = ROUTES[Stats]
            if topic:
                command, options = route.read({}, query, b"")
                answer = route.encode(await self._dispatcher.run(command, request), options)
            else:
                if query:
                    raise BadRequest(f"unknown parameter {min(query)!r}; /v1/stats has topic")
                answer = await self._all_stats(request)
        await exchange.respond(answer)

    async def _all_stats(self, request: Request) -> bytes:
        names: list[str] = []
        page: ResultPage[Any] = await self._dispatcher.run(ListTopics(), request)
        names += [info.name for info in page.items]
        while page.cursor is not None:
            page = await self._dispatcher.step(ListTopics(page.cursor), request)
            names += [info.name for info in page.items]
        visible = [name for name in names if request.caller.may(Right.CONSUME, name)]
        route = ROUTES[Stats]
        items = [route.encode(await self._dispatcher.step(Stats(name), request)) for name in visible]
        return b'{"items":[' + b",".join(items) + b"]}"

    # -- docs ------------------------------------------------------------------------------------------------------

    async def docs(self, exchange: Exchange) -> None:
        if "docs" not in self._made:
            self._made["docs"] = docs_page(document()).encode()
        await exchange.respond(self._made["docs"], content_type=HTML, headers=POLICY)

    async def openapi(self, exchange: Exchange) -> None:
        if "openapi" not in self._made:
            self._made["openapi"] = msgspec.json.encode(document())
        await exchange.respond(self._made["openapi"])
