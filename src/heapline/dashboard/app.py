"""The dashboard as an ASGI application: who is logged in, pages, streams, changes, files.

Every answer forbids scripts and styles that do not come from this server. A page needs a session, and a change also its
CSRF token. Pages and changes call the broker as the logged-in principal (caller.py) and in no other way.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from heapline.contract.errors import BadRequest, HeaplineError, PermissionDenied, Unauthenticated
from heapline.dashboard import page as page_module
from heapline.dashboard.actions import ACTIONS, Action
from heapline.dashboard.caller import INTERFACE, Caller, Memory
from heapline.dashboard.features import features_of
from heapline.dashboard.forms import joined, read_form
from heapline.dashboard.live import SIGNED_OUT, VIEWS_MAX, Views
from heapline.dashboard.page import PageKind, Place, element_id, path_to
from heapline.dashboard.pages import SECTIONS
from heapline.dashboard.render import Parts, make_environment
from heapline.dashboard.static_files import read_files, third_party_files
from heapline.logs import Log
from heapline.server.auth.principals import LOCAL, NoAuthGuard
from heapline.server.auth.secret import Secret
from heapline.server.auth.sessions import Session, is_cross_site
from heapline.server.gate import Request as GateRequest
from heapline.server.gate import correlation_id
from heapline.server.limits import Counter
from heapline.server.protocols.http import DASHBOARD
from heapline.server.server import Server
from heapline.wire import error_codes

STREAMS_MAX = 40  # of one key or user: one browser needs one, and all views together are bounded
POLICY = "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
NO_STORE = "no-store"
THEMES = ("light", "dark")
log = Log("heapline.dashboard")
Handler = Callable[[Request], Awaitable[Response]]


class NotFound(BadRequest):
    http_status = 404


def _refuse_other_sites(request: Request) -> None:
    if is_cross_site(request.headers):
        raise BadRequest("this login did not come from a page of this server; open the login page and try again")


class EventStream(StreamingResponse):
    """Server-sent events. What they hold is released when the response ends, even if it never began."""

    def __init__(self, events: AsyncIterator[bytes], held: contextlib.ExitStack) -> None:
        headers = {"cache-control": NO_STORE, "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


class Dashboard:
    """Serves what is below /ui/ of one server."""

    def __init__(self, server: Server) -> None:
        settings = server.settings
        self._dispatcher, self._gate = server.dispatcher, server.gate
        self._prefix, self._read_only = settings.http_prefix, settings.read_only
        self._is_open = isinstance(server.gate.guard, NoAuthGuard)
        self.sessions, self._memory = server.sessions, Memory()
        self._files = read_files()
        self._missing = [name for name in third_party_files() if name not in self._files]
        self.views = Views(self._render_parts, lambda: self._memory.shared_seconds)
        self._streams = Counter("open pages", STREAMS_MAX)
        self._environment = make_environment(
            url=self.url,
            static=self._static_url,
            path_to=path_to,
            element_id=element_id,
            has_file=self._files.__contains__,
            missing=self._missing,
            version=version("heapline"),
            read_only=self._read_only,
        )
        self._router = Router(
            [
                Route("/ui/static/{name:path}", self._serve_file),
                Route("/ui/login", self._guarded(self._show_login), methods=["GET"]),
                Route("/ui/login", self._guarded(self._log_in), methods=["POST"]),
                Route("/ui/login/{token}", self._guarded(self._open_link), methods=["GET"]),
                Route("/ui/login/{token}", self._guarded(self._redeem), methods=["POST"]),
                Route("/ui/logout", self._guarded(self._log_out), methods=["POST"]),
                Route("/ui/live", self._guarded(self._stream), methods=["GET"]),
                Route("/ui/do/{name}", self._guarded(self._show_action), methods=["GET"]),
                Route("/ui/do/{name}", self._guarded(self._act), methods=["POST"]),
                Route("/ui/{path:path}", self._guarded(self._show_page), methods=["GET"]),
                Route("/ui", self._to_start, methods=["GET"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in given]
                if self._gate.stopping.is_set():
                    more.append((b"connection", b"close"))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._router(scope, receive, send_with_headers)

    def url(self, path: str) -> str:
        """Return the address of a path below /ui, from the server's root."""
        return f"{self._prefix}{DASHBOARD}{path}"

    # -- errors ----------------------------------------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Handler:
        """Answer errors as pages, or as what a dialog shows."""

        async def respond(request: Request) -> Response:
            request.state.correlation_id = correlation_id(request.headers.get("x-correlation-id"))
            try:
                response = await handler(request)
            except Unauthenticated as error:
                return self._to_login(request, error)
            except HeaplineError as error:
                return self._error_page(request, error)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:
                log.exception("page failed", path=request.url.path, correlation_id=request.state.correlation_id)
                return self._error_page(request, None)
            response.headers.setdefault("cache-control", NO_STORE)
            return response

        return respond

    def _to_login(self, request: Request, error: Unauthenticated) -> Response:
        if "hx-request" in request.headers:
            return Response(status_code=204, headers={"hx-redirect": self.url("/login")})
        if request.method == "GET" and not request.url.path.startswith("/ui/login"):
            after = request.url.path.removeprefix("/ui") + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(self.url(f"/login?next={quote(after, safe='')}"), 303)
        return self._login_page(request, 401, str(error), request.query_params.get("next", "/"))

    def _error_page(self, request: Request, error: HeaplineError | None) -> Response:
        text, status, right = error_codes.INTERNAL_TEXT, 500, None
        if error is not None:
            described = error_codes.describe(error)
            status = getattr(error, "http_status", None) or error_codes.codes_of(type(error)).http
            text = error_codes.advise(described, "page")
            if isinstance(error, PermissionDenied):
                right = f"{error.topic or '*'}:{error.action}"
        variables = {"status": status, "text": text, "right": right, "request_id": request.state.correlation_id}
        if "hx-request" in request.headers:
            return self._html("error_dialog.html", variables, status)
        session = self._session_or_none(request)
        if session is None:
            return self._html("error_page.html", {**variables, "theme": _theme(request), "title": "Error"}, status)
        caller = self._caller(request, session)
        shared = self._layout(request, session, caller, "", "error.html", None)
        return self._html("layout.html", {**shared, **variables, "title": "Error"}, status)

    # -- sessions --------------------------------------------------------------------------------------------------

    def _session(self, request: Request) -> Session:
        if self._is_open and self.sessions.cookie_name not in request.cookies:
            return self.sessions.start(LOCAL)
        return self.sessions.recognize(request.headers.get("cookie"))

    def _session_or_none(self, request: Request) -> Session | None:
        try:
            return self._session(request)
        except HeaplineError:
            return None

    def _caller(self, request: Request, session: Session) -> Caller:
        return Caller(
            self._dispatcher, session.principal, self._memory, {"x-correlation-id": request.state.correlation_id}
        )

    def _login_page(self, request: Request, status: int, error: str, after: str) -> Response:
        variables = {"error": error, "after": after, "theme": _theme(request), "title": "Log in"}
        return self._html("login.html", variables, status)

    async def _show_login(self, request: Request) -> Response:
        after = request.query_params.get("next", "/")
        if self._session_or_none(request) is not None:
            return RedirectResponse(self.url(_local(after)), 303)
        return self._login_page(request, 200, "", after)

    async def _log_in(self, request: Request) -> Response:
        form = await read_form(request)
        _refuse_other_sites(request)
        after = form.get("next", "/")
        try:
            if form.get("key"):
                session = await self.sessions.login_with_key(Secret(form["key"]))
            else:
                session = await self.sessions.login(form.get("email", ""), Secret(form.get("password", "")))
        except HeaplineError as error:
            status = error_codes.codes_of(type(error)).http
            return self._login_page(request, status, str(error_codes.describe(error)["text"]), after)
        return self._start(request, session, after)

    async def _open_link(self, request: Request) -> Response:
        """Log in only where a browser says that a person opened the link; otherwise show a button that does.

        A link works once, so a chat's preview must not use it up, and no other site may log a person in with one.
        """
        given = request.headers
        is_opened = (given.get("sec-fetch-site"), given.get("sec-fetch-mode")) == ("none", "navigate")
        if request.method == "GET" and is_opened and not ({"sec-purpose", "purpose"} & set(given)):
            return await self._redeem(request)
        return self._html("login_link.html", {"theme": _theme(request)})

    async def _redeem(self, request: Request) -> Response:
        _refuse_other_sites(request)
        return self._start(request, self.sessions.redeem(request.path_params["token"]), "/")

    def _start(self, request: Request, session: Session, after: str) -> Response:
        response = RedirectResponse(self.url(_local(after)), 303)
        response.headers["set-cookie"] = self._cookie(request, session)
        return response

    def _cookie(self, request: Request, session: Session) -> str:
        # The scheme is that of the browser, even behind a proxy on this machine that sends x-forwarded-proto.
        return self.sessions.set_cookie(session, path=self.url(""), secure=request.url.scheme == "https")

    async def _log_out(self, request: Request) -> Response:
        session = self._session(request)
        self.sessions.check_change(session, request.headers, (await read_form(request)).get("csrf"))
        self.sessions.end(session)
        self.views.poke()  # ends this session's streams
        response = RedirectResponse(self.url("/login"), 303)
        is_secure = request.url.scheme == "https"
        response.headers["set-cookie"] = self.sessions.clear_cookie(path=self.url(""), secure=is_secure)
        return response

    # -- pages -----------------------------------------------------------------------------------------------------

    async def _to_start(self, request: Request) -> Response:
        return RedirectResponse(self.url("/"), 302)

    async def _show_page(self, request: Request) -> Response:
        found = page_module.find(f"/{request.path_params['path']}", request.url.query)
        session = self._session(request)
        if found is None:
            raise NotFound("this page does not exist; choose one on the left")
        kind, place = found
        caller = self._caller(request, session)
        variables = await kind.load(caller, place)
        features = await features_of(caller)
        shared = self._layout(request, session, caller, kind.section, kind.template, place)
        shared["sections"] = [section for section in SECTIONS if section.feature in features]
        live = place.key if kind.is_live and not self._missing else ""
        parts = {"place": place, "parts": Parts(), "live": live}
        response = self._html("layout.html", {**shared, **parts, **variables})
        if self._is_open and self.sessions.cookie_name not in request.cookies:
            response.headers["set-cookie"] = self._cookie(request, session)
        return response

    def _layout(
        self, request: Request, session: Session, caller: Caller, section: str, template: str, place: Place | None
    ) -> dict[str, Any]:
        return {
            "template": template,
            "section": section,
            "place": place,
            "parts": Parts(),
            "live": "",
            "theme": _theme(request),
            "who": caller.principal.subject,
            "csrf": session.csrf_token,
            "sections": SECTIONS,
            **self._rights(caller),
        }

    def _rights(self, caller: Caller) -> dict[str, Any]:
        """Return what templates ask about rights. Two callers with the same scopes see the same."""

        def may_change(topic: str | None) -> bool:
            return not self._read_only and caller.may_admin(topic)

        return {"may_change": may_change, "may_administer": caller.may_admin(None)}

    def _render_parts(self, kind: PageKind, place: Place, caller: Caller, variables: dict[str, Any]) -> Parts:
        parts = Parts()
        shared = {"place": place, "parts": parts, **self._rights(caller)}
        self._environment.get_template(kind.template).render({**shared, **variables})
        return parts

    def _html(self, template: str, variables: Mapping[str, Any], status: int = 200) -> Response:
        text = self._environment.get_template(template).render(variables)
        return Response(text, status, {"cache-control": NO_STORE}, "text/html")

    # -- streams ---------------------------------------------------------------------------------------------------

    async def _stream(self, request: Request) -> Response:
        cookies = request.headers.get("cookie")
        session = self._session_or_none(request)
        if session is None:
            return Response(SIGNED_OUT, media_type="text/event-stream")
        places = []
        for key in request.query_params.getlist("view")[:VIEWS_MAX]:
            path, _, query = key.partition("?")
            found = page_module.find(path, query)
            if found is not None and found[0].is_live:
                places.append(found)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        subject = session.principal.subject
        opened = GateRequest(self._gate, INTERFACE, "Live", dict(request.headers), is_stream=True)
        opened.begin(session.principal)
        try:
            self._gate.admit(opened)
            self._streams.take(subject)
        except HeaplineError as error:
            opened.end(error)
            raise

        def last_words() -> bytes | None:
            if self._gate.stopping.is_set():
                return b": stopping\n\n"
            try:
                self.sessions.recognize(cookies)
            except HeaplineError:
                return SIGNED_OUT
            return None

        held = contextlib.ExitStack()
        held.callback(opened.end)
        held.callback(self._streams.give_back, subject)
        try:
            watcher = held.enter_context(self.views.watch(places, self._caller(request, session)))
        except HeaplineError:
            held.close()
            raise
        return EventStream(watcher.events(last_words), held)

    # -- changes ---------------------------------------------------------------------------------------------------

    def _action(self, request: Request) -> Action:
        action = ACTIONS.get(request.path_params["name"])
        if action is None:
            raise NotFound("this action does not exist; reload the page")
        if self._read_only:
            raise BadRequest("this dashboard is read-only; the server was started with --read-only")
        return action

    async def _show_action(self, request: Request) -> Response:
        action, session = self._action(request), self._session(request)
        arguments = joined(request.query_params.multi_items())
        dialog = await action.prepare(self._caller(request, session), arguments)
        address = self.url(path_to(f"/do/{action.name}", **arguments))
        variables = {"dialog": dialog, "address": address, "csrf": session.csrf_token, "error": ""}
        return self._html("dialog.html", variables)

    async def _act(self, request: Request) -> Response:
        action, session = self._action(request), self._session(request)
        form = await read_form(request)
        self.sessions.check_change(session, request.headers, form.get("csrf"))
        caller = self._caller(request, session)
        arguments = joined(request.query_params.multi_items())
        try:
            action.check(arguments, form)
            done = await action.run(caller, arguments, form)
        except Unauthenticated:
            raise
        except HeaplineError as error:  # the dialog stays open, with what was entered
            dialog = await action.prepare(caller, arguments | form)
            address = self.url(path_to(f"/do/{action.name}", **arguments))
            text = error_codes.advise(error_codes.describe(error), "page")
            return self._html(
                "dialog.html", {"dialog": dialog, "address": address, "csrf": session.csrf_token, "error": text}
            )
        self._memory.forget_stats()
        self.views.poke()
        variables = {"done": done, "request_id": caller.correlation_id, "may_administer": caller.may_admin(None)}
        response = self._html("done.html", variables)
        if done.goto is not None:
            response.headers["hx-redirect"] = self.url(done.goto)
        return response

    # -- files -----------------------------------------------------------------------------------------------------

    def _static_url(self, name: str) -> str:
        file = self._files.get(name)
        return self.url(f"/static/{name}" + ("" if file is None else f"?v={file.digest}"))

    async def _serve_file(self, request: Request) -> Response:
        file = self._files.get(request.path_params["name"])
        if file is None:
            return Response("no such file\n", 404, media_type="text/plain")
        is_current = request.query_params.get("v") == file.digest
        age = "max-age=31536000, immutable" if is_current else "no-cache"
        headers = {"cache-control": f"public, {age}", "etag": f'"{file.digest}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.media_type)


def _local(path: str) -> str:
    """Return a path below /ui, or the start page if it could lead elsewhere."""
    is_local = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if is_local else "/"


def _theme(request: Request) -> str:
    theme = request.cookies.get("heapline_theme", "")
    return theme if theme in THEMES else ""
