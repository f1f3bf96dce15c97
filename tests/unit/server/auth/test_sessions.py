"""Browser sessions: how they start, what ends them, and that a change comes from their own pages."""

from __future__ import annotations

from typing import Any

import jwt
import pytest

from heapline.contract.errors import BadRequest, ResourceExhausted, Unauthenticated
from heapline.server.auth.principals import LOCAL, NoAuthGuard, parse_scope
from heapline.server.auth.secret import Secret
from heapline.server.auth.sessions import ENDED_MAX, LINK_MS, LINKS_MAX, BrowserSessions, Session, is_cross_site
from heapline.server.auth.users import BY_EMAIL, TOKEN_MS
from tests.unit.server.auth.rig import PASSWORD, Rig

EMAIL = "ada@example.org"
SESSION_MS = 3_600_000


class Browser:
    """A guard, sessions over it, and what they reported of logins."""

    def __init__(self, rig: Rig | None = None) -> None:
        self.rig = rig or Rig()
        self.sessions = BrowserSessions(self.rig.guard, self.rig.clock, SESSION_MS)
        self.logins: list[tuple[str, str]] = []
        self.sessions.on_login = lambda who, error: self.logins.append((who, type(error).__name__ if error else "ok"))

    def add_user(self, *scopes: str) -> None:
        self.rig.guard.users.add(EMAIL, Secret(PASSWORD), scopes or ("*:consume",))

    async def of_user(self) -> Session:
        self.add_user()
        return await self.sessions.login(EMAIL, Secret(PASSWORD))

    async def of_key(self) -> Session:
        return await self.sessions.login_with_key(Secret(self.rig.key("orders/*:consume")[1]))

    def sent(self, session: Session, **changes: Any) -> str:
        """The cookie header of a browser, with the claims changed and signed again."""
        text = session.cookie.reveal()
        if changes:
            claims = jwt.decode(text, options={"verify_signature": False}) | changes
            text = jwt.encode(claims, self.rig.guard.secret("browser session"), algorithm="HS256")
        return f"theme=dark; {self.sessions.cookie_name}={text}; other=1"

    def refuses(self, cookies: str | None) -> None:
        with pytest.raises(Unauthenticated, match="log in again"):
            self.sessions.recognize(cookies)


async def test_login_starts_a_session_of_the_user() -> None:
    browser = Browser()
    session = await browser.of_user()
    found = browser.sessions.recognize(browser.sent(session))
    assert found == session or (found.principal, found.id) == (session.principal, session.id)
    assert found.principal.subject == f"user:{EMAIL}"
    assert found.principal.scopes == (parse_scope("*:consume"),)
    assert browser.rig.guard.is_valid(found.principal)


async def test_session_outlives_the_token_that_a_password_gives() -> None:
    browser = Browser()
    session = await browser.of_user()
    browser.rig.clock.advance(TOKEN_MS / 1000 + 1)
    assert browser.rig.guard.is_valid(browser.sessions.recognize(browser.sent(session)).principal)


async def test_session_of_a_key_has_its_rights_and_is_reported() -> None:
    browser = Browser()
    session = await browser.of_key()
    assert session.principal.scopes == (parse_scope("orders/*:consume"),)
    assert browser.logins == [(session.principal.subject, "ok")]
    assert browser.sessions.recognize(browser.sent(session)).principal == session.principal


async def test_wrong_credentials_start_no_session() -> None:
    browser = Browser()
    browser.add_user()
    key_id, key = browser.rig.key()
    with pytest.raises(Unauthenticated):
        await browser.sessions.login(EMAIL, Secret("wrong password"))
    for wrong in ("", "nonsense", key[:-1], f"{key[:-1]}{'a' if key[-1] != 'a' else 'b'}"):
        with pytest.raises(Unauthenticated):
            await browser.sessions.login_with_key(Secret(wrong))
    assert browser.logins[-1] == (f"key:{key_id}", "Unauthenticated")
    assert not any(key in str(line) for line in browser.logins)


async def test_passwords_are_throttled_as_for_tokens() -> None:
    browser = Browser()
    browser.add_user()
    for _ in range(BY_EMAIL.burst):
        with pytest.raises(Unauthenticated):
            await browser.sessions.login(EMAIL, Secret("wrong password"))
    with pytest.raises(ResourceExhausted):
        await browser.sessions.login(EMAIL, Secret(PASSWORD))


async def test_session_expires_and_so_does_its_principal() -> None:
    browser = Browser()
    sessions = (await browser.of_user(), await browser.of_key())
    browser.rig.clock.advance(SESSION_MS / 1000 - 1)
    assert all(browser.rig.guard.is_valid(session.principal) for session in sessions)
    browser.rig.clock.advance(1)
    for session in sessions:
        assert not browser.rig.guard.is_valid(session.principal)
        browser.refuses(browser.sent(session))


@pytest.mark.parametrize("change", ["disable", "password", "scopes"])
async def test_session_ends_when_its_user_changes(change: str) -> None:
    browser = Browser()
    session = await browser.of_user()
    changes: dict[str, dict[str, Any]] = {
        "disable": {"disabled": True},
        "password": {"password": Secret("another password")},
        "scopes": {"scopes": ["*:consume,admin"]},
    }
    browser.rig.other_process().guard.users.change(EMAIL, **changes[change])
    browser.rig.clock.advance(1)
    assert not browser.rig.guard.is_valid(session.principal)
    browser.refuses(browser.sent(session))


async def test_session_ends_when_its_key_is_revoked() -> None:
    browser = Browser()
    session = await browser.of_key()
    browser.rig.other_process().guard.keys.revoke(session.principal.subject)
    browser.rig.clock.advance(1)
    assert not browser.rig.guard.is_valid(session.principal)
    browser.refuses(browser.sent(session))


async def test_ended_session_stays_ended_and_others_go_on() -> None:
    browser = Browser()
    first = await browser.of_user()
    second = browser.sessions.start(first.principal)
    browser.sessions.end(first)
    browser.refuses(browser.sent(first))
    browser.sessions.recognize(browser.sent(second))


async def test_memory_of_ended_sessions_is_bounded_and_empties() -> None:
    browser = Browser()
    session = await browser.of_user()
    browser.sessions._ended.update((f"s{n}", session.principal.expires_at or 0) for n in range(ENDED_MAX))
    browser.sessions.end(session)
    assert len(browser.sessions._ended) == ENDED_MAX
    browser.refuses(browser.sent(session))
    browser.rig.clock.advance(SESSION_MS / 1000)
    browser.sessions.end(browser.sessions.start(session.principal))
    assert len(browser.sessions._ended) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 9_999_999_999}, {"iat": 9_999_999_000, "exp": 9_999_999_999}, {"epoch": 2}, {"epoch": "1"},
        {"sub": "user:nobody@example.org"}, {"sub": "local"}, {"sub": ""}, {"exp": 1},
    ],
    ids=str,
)  # fmt: skip
async def test_cookie_is_refused_with(changes: dict[str, Any]) -> None:
    browser = Browser()
    session = await browser.of_user()
    browser.sessions.recognize(browser.sent(session, jti="another id"))  # so that the refusal is for the change
    browser.refuses(browser.sent(session, **changes))


async def test_token_of_the_api_is_not_a_cookie_and_the_cookie_is_not_a_token() -> None:
    browser = Browser()
    session = await browser.of_user()
    token = (await browser.rig.guard.login(EMAIL, Secret(PASSWORD))).reveal()
    browser.refuses(f"{browser.sessions.cookie_name}={token}")
    with pytest.raises(Unauthenticated):
        await browser.rig.guard.authenticate(f"Bearer {session.cookie.reveal()}")


@pytest.mark.parametrize("cookies", [None, "", ";;", "=", "heapline_00000000=x", "x" * 100_000])
def test_header_without_a_session_is_refused(cookies: str | None) -> None:
    browser = Browser()
    browser.refuses(cookies)
    browser.refuses(f"{browser.sessions.cookie_name}={cookies}")


# -- links -------------------------------------------------------------------------------------------------------------


async def test_link_starts_one_session_of_its_principal() -> None:
    browser = Browser()
    principal = (await browser.of_key()).principal
    link = browser.sessions.mint_link(principal)
    assert browser.sessions.redeem(link.token.reveal()).principal.subject == principal.subject
    with pytest.raises(Unauthenticated, match="was used"):
        browser.sessions.redeem(link.token.reveal())
    assert [outcome for _, outcome in browser.logins] == ["ok", "ok", "Unauthenticated"]


async def test_link_expires_and_ends_with_its_key() -> None:
    browser = Browser()
    principal = (await browser.of_key()).principal
    late, revoked = browser.sessions.mint_link(principal), browser.sessions.mint_link(principal)
    browser.rig.clock.advance(LINK_MS / 1000)
    with pytest.raises(Unauthenticated, match="expired"):
        browser.sessions.redeem(late.token.reveal())
    revoked = browser.sessions.mint_link(principal)
    browser.rig.guard.keys.revoke(principal.subject)
    with pytest.raises(Unauthenticated):
        browser.sessions.redeem(revoked.token.reveal())


async def test_link_of_a_user_ends_with_a_new_password() -> None:
    browser = Browser()
    link = browser.sessions.mint_link((await browser.of_user()).principal)
    browser.rig.guard.users.change(EMAIL, password=Secret("another password"))
    with pytest.raises(Unauthenticated):
        browser.sessions.redeem(link.token.reveal())


async def test_number_of_links_is_bounded_and_the_newest_work() -> None:
    browser = Browser()
    principal = (await browser.of_key()).principal
    links = [browser.sessions.mint_link(principal) for _ in range(LINKS_MAX + 1)]
    with pytest.raises(Unauthenticated):
        browser.sessions.redeem(links[0].token.reveal())
    browser.sessions.redeem(links[1].token.reveal())
    browser.sessions.redeem(links[-1].token.reveal())


# -- changes -----------------------------------------------------------------------------------------------------------

OWN = {"sec-fetch-site": "same-origin", "host": "queue:7480", "origin": "http://queue:7480"}


async def test_change_needs_the_token_of_its_own_session() -> None:
    browser = Browser()
    session, other = await browser.of_user(), await browser.of_key()
    browser.sessions.check_change(session, OWN, session.csrf_token)
    assert browser.sessions.recognize(browser.sent(session)).csrf_token == session.csrf_token
    for wrong in (None, "", "é", other.csrf_token, session.csrf_token[:-1], session.id):
        with pytest.raises(BadRequest, match="reload"):
            browser.sessions.check_change(session, OWN, wrong)


@pytest.mark.parametrize(
    ("headers", "crosses"),
    [
        (OWN, False), ({}, False), ({"sec-fetch-site": "none"}, False), ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True), ({"host": "q", "origin": "http://q"}, False),
        ({"host": "q", "origin": "http://evil"}, True), ({"host": "q", "origin": "null"}, True),
        ({"host": "q:1", "origin": "http://q:2"}, True),
    ],
    ids=str,
)  # fmt: skip
async def test_change_from_another_site_is_refused(headers: dict[str, str], crosses: bool) -> None:
    assert is_cross_site(headers) is crosses
    browser = Browser()
    session = await browser.of_user()
    if crosses:
        with pytest.raises(BadRequest, match="reload"):
            browser.sessions.check_change(session, headers, session.csrf_token)
    else:
        browser.sessions.check_change(session, headers, session.csrf_token)


# -- the cookie --------------------------------------------------------------------------------------------------------


async def test_cookie_is_hidden_from_scripts_and_other_sites() -> None:
    browser = Browser()
    session = await browser.of_user()
    header = browser.sessions.set_cookie(session, path="/queue/ui", secure=True)
    name, _, rest = header.partition("=")
    value, *attributes = rest.split("; ")
    assert (name, value) == (browser.sessions.cookie_name, session.cookie.reveal())
    assert attributes == ["Path=/queue/ui", "Max-Age=3600", "HttpOnly", "SameSite=Lax", "Secure"]
    assert "Secure" not in browser.sessions.set_cookie(session, secure=False)
    assert "Max-Age=0" in browser.sessions.clear_cookie(secure=False)


async def test_session_and_link_do_not_print_their_secrets() -> None:
    browser = Browser()
    session = await browser.of_user()
    link = browser.sessions.mint_link(session.principal)
    assert session.cookie.reveal() not in repr(session)
    assert session.csrf_token not in repr(session)
    assert link.token.reveal() not in repr(link)


def test_servers_with_their_own_users_have_their_own_cookie_names() -> None:
    first, rig = Browser(), Rig()
    assert Browser(first.rig.other_process()).sessions.cookie_name == first.sessions.cookie_name
    assert Browser(rig).sessions.cookie_name != first.sessions.cookie_name


async def test_server_without_authentication_starts_sessions_of_the_local_administrator() -> None:
    sessions = BrowserSessions(NoAuthGuard(), Rig().clock)
    session = sessions.start(LOCAL)
    found = sessions.recognize(f"{sessions.cookie_name}={session.cookie.reveal()}")
    assert found.principal.subject == "local"
    with pytest.raises(BadRequest, match="no users"):
        await sessions.login(EMAIL, Secret(PASSWORD))
