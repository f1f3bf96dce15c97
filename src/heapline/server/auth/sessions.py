"""Browser sessions: a signed cookie in the place of a credential, and the one-time links that start a session.

The cookie is a JWT of the subject (`key:…` or `user:…`), the times, an id and the user's epoch. It has no rights: they
are looked up on every request, so a revoked key, a disabled user, a new password or new scopes end the sessions, on
open streams too. A session that its user ended is remembered until it would expire. That memory and the links belong to
one process and do not survive it. Nothing here knows HTTP beyond the text of a header.

How pages use it:

    session = await sessions.login(email, password)        # or login_with_key(key), or redeem(link)
    header = sessions.set_cookie(session, path="/ui", secure=True)        # the value of set-cookie
    session = sessions.recognize(headers.get("cookie"))        # Unauthenticated: show the login page
    request.begin(session.principal)        # a gate.Request, whose commands then run as that principal
    sessions.check_change(session, headers, form["csrf"])        # before every change; login has is_cross_site alone
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from heapline.clock import Clock
from heapline.contract.errors import BadRequest, Unauthenticated
from heapline.server.auth.guard import OnLogin, StoreGuard
from heapline.server.auth.principals import ANONYMOUS, Guard, Principal
from heapline.server.auth.secret import KEY, Secret
from heapline.server.auth.users import Claims, is_current, new_claims, read_token, sign

SESSION_MS = 12 * 3600_000
LINK_MS = 10 * 60_000
COOKIE_MAX = 4096  # bytes, as in browsers
LINKS_MAX, ENDED_MAX = 100, 10_000
SESSION_REJECTED = "the session has ended or is not valid; log in again"
LINK_REJECTED = "the login link is not valid, was used, or has expired; run `heapline dashboard` for another one"
CHANGE_REJECTED = "this change did not come from a page of this session; reload the page and try again"


@dataclass(frozen=True)
class Session:
    principal: Principal
    id: str
    cookie: Secret
    csrf_token: str = field(repr=False)  # for the forms of this session's pages


@dataclass(frozen=True)
class LoginLink:
    token: Secret
    expires_at: int  # wall ms


class BrowserSessions:
    """Use it from one event loop."""

    def __init__(self, guard: Guard, clock: Clock, session_ms: int = SESSION_MS) -> None:
        self._guard, self._clock, self._session_ms = guard, clock, session_ms
        self._secret, self._csrf_secret = guard.secret("browser session"), guard.secret("csrf")
        #: Cookies ignore ports: two servers on one host need two names, and servers that share users one.
        self.cookie_name = f"heapline_{guard.secret('cookie name').hex()[:8]}"
        self._links: dict[bytes, tuple[Principal, int]] = {}  # digest -> who, and expiry; oldest first
        self._ended: dict[str, int] = {}  # id of a session -> its expiry, oldest first
        self.on_login: OnLogin | None = None  # as the guard's, for keys and links

    # -- starting --------------------------------------------------------------------------------------------------

    async def login(self, email: str, password: Secret) -> Session:
        """Start a session of a user. Raise Unauthenticated, or ResourceExhausted after too many attempts."""
        if not isinstance(self._guard, StoreGuard):
            raise BadRequest("this server has no users; use it without logging in")
        token = await self._guard.login(email, password)
        return self.start(await self._guard.authenticate(token.reveal()))

    async def login_with_key(self, key: Secret) -> Session:
        """Start a session of an API key."""
        match = KEY.match(key.reveal().strip())
        subject = f"key:{match[1] if match else ''}"
        try:
            if match is None:
                raise Unauthenticated("this is not an API key; a key begins with hl_")
            session = self.start(await self._guard.authenticate(match[0]))
        except BaseException as error:
            self._report(subject, error)
            raise
        self._report(subject, None)
        return session

    def mint_link(self, principal: Principal, valid_ms: int = LINK_MS) -> LoginLink:
        """Return a link that starts one session as this principal, whose caller has its rights already."""
        now = self._clock.wall_ms()
        self._links = {digest: link for digest, link in self._links.items() if link[1] > now}
        if len(self._links) >= LINKS_MAX:
            del self._links[next(iter(self._links))]
        link = LoginLink(Secret(secrets.token_urlsafe(32)), now + valid_ms)
        self._links[_digest(link.token.reveal())] = principal, link.expires_at
        return link

    def redeem(self, token: str) -> Session:
        """Start the session of a link, which is then used up. Raise Unauthenticated if it is not valid."""
        minted_for, expires_at = self._links.pop(_digest(token), (ANONYMOUS, 0))
        principal = self._guard.principal(minted_for.subject)
        is_same = principal is not None and principal.token_epoch == minted_for.token_epoch
        if principal is None or not is_same or self._clock.wall_ms() >= expires_at:
            error = Unauthenticated(LINK_REJECTED)
            self._report(minted_for.subject, error)
            raise error
        self._report(minted_for.subject, None)
        return self.start(principal)

    def start(self, principal: Principal) -> Session:
        """Start a session of a principal that was authenticated."""
        now = self._clock.wall_ms()
        claims = new_claims(principal.subject, principal.token_epoch, now, self._session_ms)
        return self._session(claims, principal, sign(claims, self._secret))

    def _session(self, claims: Claims, principal: Principal, text: str) -> Session:
        csrf = hmac.digest(self._csrf_secret, claims.id.encode(), hashlib.sha256).hex()
        return Session(claims.apply_to(principal), claims.id, Secret(text), csrf)

    def _report(self, subject: str, error: BaseException | None) -> None:
        if self.on_login is not None:
            self.on_login(subject, error)

    # -- using -----------------------------------------------------------------------------------------------------

    def recognize(self, cookies: str | None) -> Session:
        """Return the session of a `cookie` header. Raise Unauthenticated if it has none that is valid."""
        text = self._cookie(cookies or "")
        claims = read_token(text, self._secret, self._session_ms) if 0 < len(text) <= COOKIE_MAX else None
        principal = None if claims is None or claims.id in self._ended else self._guard.principal(claims.subject)
        if claims is None or principal is None:
            raise Unauthenticated(SESSION_REJECTED)
        session = self._session(claims, principal, text)
        is_same_user = principal.token_epoch == claims.epoch
        if not (is_same_user and is_current(session.principal, self._clock.wall_ms())):
            raise Unauthenticated(SESSION_REJECTED)
        if not self._guard.is_valid(session.principal):
            raise Unauthenticated(SESSION_REJECTED)
        return session

    def _cookie(self, header: str) -> str:
        for pair in header.split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self.cookie_name:
                return value
        return ""

    def check_change(self, session: Session, headers: Mapping[str, str], token: str | None) -> None:
        """Raise BadRequest unless a change comes from a page of this session, by its origin and its CSRF token."""
        same = hmac.compare_digest((token or "").encode(), session.csrf_token.encode())
        if not same or is_cross_site(headers):
            raise BadRequest(CHANGE_REJECTED)

    def end(self, session: Session) -> None:
        """End a session, so that a copy of its cookie is worth nothing. In this process only."""
        now = self._clock.wall_ms()
        self._ended = {ended: until for ended, until in self._ended.items() if until > now}
        if len(self._ended) >= ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[session.id] = session.principal.expires_at or 0

    # -- the cookie ------------------------------------------------------------------------------------------------

    def set_cookie(self, session: Session, *, path: str = "/", secure: bool) -> str:
        """Return the `set-cookie` header of a session. `secure`: the page was loaded over TLS."""
        return self._header(session.cookie.reveal(), self._session_ms // 1000, path, secure)

    def clear_cookie(self, *, path: str = "/", secure: bool) -> str:
        return self._header("", 0, path, secure)

    def _header(self, value: str, seconds: int, path: str, secure: bool) -> str:
        # Lax: a link from a chat opens logged in. Changes are POSTs, for which browsers withhold it, and need a token.
        end = "; Secure" if secure else ""
        return f"{self.cookie_name}={value}; Path={path}; Max-Age={seconds}; HttpOnly; SameSite=Lax{end}"


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether a browser says that another site's page sent this request. Header names are in lower case."""
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")  # older browsers, and addresses without TLS
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
