"""Ways of serving the dashboard: below a prefix, without its third-party files, without login, and links to it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.conftest import ServerProcess, expect

pytestmark = pytest.mark.slow


def test_dashboard_works_behind_a_proxy_with_a_path_prefix(
    own_server: Callable[..., Any], new_page: Callable[..., Any]
) -> None:
    server = own_server("--http-prefix", "/queue/one")
    base = f"http://127.0.0.1:{server.http_port}/queue/one"
    with server.client() as hl:
        hl.create_topic("prefixed")
    page = new_page()
    page.goto(base + "/")
    page.get_by_label("API key").fill(server.key)
    page.get_by_role("button", name="Log in with a key").click()
    expect(page).to_have_url(base + "/ui/")
    expect(page.locator("#link")).to_have_text("Live")
    page.get_by_role("link", name="prefixed").click()
    expect(page).to_have_url(base + "/ui/topics/prefixed")
    page.get_by_role("button", name="Pause").click()
    page.locator("#dialog button.primary").click()
    expect(page.locator("#title .pill")).to_have_text("Paused")
    (cookie,) = [each for each in page.context.cookies() if each["name"] != "heapline_theme"]
    assert cookie["path"] == "/queue/one/ui"
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")


def test_cookie_is_secure_behind_a_proxy_that_encrypts(server: Any) -> None:
    for headers, is_secure in (({}, False), ({"x-forwarded-proto": "https"}, True)):
        form = {"key": server.key}
        answer = httpx.post(server.url + "/login", data=form, headers=headers, trust_env=False)
        assert ("; Secure" in answer.headers["set-cookie"]) is is_secure


def test_server_without_authentication_needs_no_login(
    own_server: Callable[..., Any], new_page: Callable[..., Any]
) -> None:
    server = own_server("--insecure-everybody")
    page = new_page()
    page.goto(server.url)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.locator("#link")).to_have_text("Live")
    page.goto(server.url + "/topics")
    page.get_by_role("button", name="Create topic").click()
    page.get_by_label("Name", exact=True).fill("open")
    page.locator("#dialog button.primary").click()
    expect(page).to_have_url(re.compile("/ui/topics/open$"))


def test_pages_work_without_third_party_files_and_name_them(
    tmp_path: Path, new_page: Callable[..., Any], watch: Any
) -> None:
    """The files are hidden from a server that is started with a program of our own."""
    watch.expected.append("404")  # the fonts
    program = tmp_path / "without.py"
    program.write_text(
        "import sys\n"
        "from heapline.dashboard import app\n"
        "read = app.read_files\n"
        "app.read_files = lambda: {n: f for n, f in read().items() if not n.startswith('vendor/')}\n"
        "from heapline.cli.main import app as cli\n"
        "cli(sys.argv[1:])\n"
    )
    server = ServerProcess(tmp_path / "data", program=[str(program)]).start()
    try:
        page = new_page()
        page.goto(server.url)
        page.get_by_label("API key").fill(server.key)
        page.get_by_role("button", name="Log in with a key").click()
        expect(page.get_by_text("The build could not fetch")).to_contain_text("vendor/htmx.min.js")
        page.get_by_role("link", name="Topics").click()
        expect(page.get_by_role("heading", name="Topics")).to_be_visible()
    finally:
        server.stop()


def test_serve_on_a_terminal_prints_a_link_that_logs_in(tmp_path: Path, new_page: Callable[..., Any]) -> None:
    outer, inner = pty.openpty()
    ports = ["--port", "0", "--grpc-port", "0", "--http-port", "0"]
    command = [sys.executable, "-m", "heapline", "serve", "--data", str(tmp_path / "data"), *ports]
    with subprocess.Popen(command, stdout=inner, stderr=subprocess.DEVNULL) as process:
        os.close(inner)
        try:
            text = b""
            while b"stop with" not in text:
                text += os.read(outer, 4096)
            found = re.search(r"http://\S+/ui/login/\S+", text.decode())
            assert found, text
            page = new_page()
            page.goto(found[0])
            expect(page.get_by_role("heading", name="Overview")).to_be_visible()
            page.close()
        finally:
            process.terminate()
            os.close(outer)


def test_dashboard_command_prints_a_link_that_logs_in(
    server: Any, new_page: Callable[..., Any], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text(server.key)
    key.chmod(0o600)
    command = [sys.executable, "-m", "heapline", "dashboard", "--show", "--to", f"127.0.0.1:{server.port}"]
    command += ["--key-file", str(key), "--url", server.url.removesuffix("/ui")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    page = new_page()
    page.goto(done.stdout.strip())
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def test_no_dashboard_means_no_pages(own_server: Callable[..., Any]) -> None:
    server = own_server("--no-dashboard")
    assert httpx.get(server.url + "/", trust_env=False).status_code == 404
    assert httpx.get(server.url.removesuffix("ui"), headers={"accept": "text/html"}, trust_env=False).status_code == 404
