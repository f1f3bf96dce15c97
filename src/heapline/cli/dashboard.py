"""`heapline dashboard`: open a server's pages in the browser, logged in."""

from __future__ import annotations

import sys
import webbrowser
from typing import Annotated, Any

import typer

from heapline.cli.connection import over_network
from heapline.cli.options import Value
from heapline.contract.admin import CreateLoginLink
from heapline.contract.errors import BadRequest

URL_HELP = "Where browsers reach the server, with the path prefix of a proxy if there is one."


@over_network("the link, and when it expires.", "--url https://queue.example.org")
async def dashboard(
    hl: Any,
    out: Any,
    url: Annotated[str, URL_HELP, Value("URL")] = "http://127.0.0.1:7480",
    show: Annotated[bool, "Print the link, and do not open it."] = False,
) -> None:
    """Open the dashboard of a server in your browser, logged in.

    The browser acts with the rights of your key, which must include admin on all topics. The link works once, within
    ten minutes.
    """
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is not a URL; write --url http://HOST:PORT")
    link = await hl.do(CreateLoginLink())
    address = f"{url.rstrip('/')}/ui/login/{link.token}"
    if out.as_json:
        out.row({"url": address, "expires_at": link.expires_at})
        return
    typer.echo(address)  # a table or box would wrap it
    if not show and sys.stdout.isatty():
        webbrowser.open(address)
