"""Every text that the SDK, tasks and outbox raise occurs here once, and says what to do. None may be missing.

The texts are read from the source: a `raise` with its own text that no case below covers fails the last test.
"""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import heapline
from heapline import outbox
from heapline.cli import worker as worker_cli
from heapline.client.sdk import ConnectedBroker
from heapline.client.target import ClientTls, parse_target
from heapline.client.tasks.arguments import Arguments
from heapline.client.tasks.broker_binding import Elsewhere, Home
from heapline.client.tasks.outcomes import Retry
from heapline.client.transports.blocking_calls import BlockingCalls
from heapline.contract import payload_codec
from heapline.outbox import relay, sender
from heapline.outbox.store import Row, fields_of

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

ROOT = Path(heapline.__file__).parent
FILES = [
    *ROOT.glob("client/**/*.py"),
    *ROOT.glob("outbox/**/*.py"),
    ROOT / "cli/worker.py",
    ROOT / "contract/payload_codec.py",
]
#: Texts that users do not see, and why.
PASSED_OVER = {
    "unreachable: pauses never end": "for those who read the code",
    "gRPC has no status for a call that has ended": "a bug of gRPC's",
    "two relays claimed the same rows; this database does not support row locks": "a database that breaks its promise",
    "has no attribute": "Python's own words",
    "f'{type(error).__name__}: {error}'": "another error's text, as Django's command tells it",
}


def task(function: Callable[..., Any], **options: Any) -> Any:
    return heapline.App(Path("./nowhere")).task(topic="t", **options)(function)


def plain(n: int) -> None: ...


def many(*numbers: int) -> None: ...


def reserved(priority: int) -> None: ...


def astray(n: Missing) -> None: ...


def unreadable(n: Callable[[], int]) -> None: ...


def variant(n: int | list[int] | set[int]) -> None: ...


def twice() -> None:
    app = heapline.App(Path("./nowhere"))
    app.task(plain)
    app.task(name="plain")(many_named)


def many_named(n: int) -> None: ...


def run(work: Callable[[], Any]) -> Any:
    async def whole() -> Any:
        found = work()
        return await found if asyncio.iscoroutine(found) else found

    return asyncio.run(whole())


def two_loops() -> None:
    hl = heapline.connect("localhost:1", deadline=0.01)
    first = asyncio.new_event_loop()
    try:
        with pytest.raises(heapline.UnavailableError):
            first.run_until_complete(hl.list_topics())
        asyncio.run(hl.list_topics())
    finally:
        first.run_until_complete(hl.close())
        first.close()


async def closed_consumer() -> None:
    consumer = heapline.connect("a:1").consume("t")
    await consumer.aclose()
    async with consumer.item():
        pass


def log_that_breaks(environment: Environment, read_again: bool = False) -> None:
    class Wire:
        async def stream(self, feed: Any, context: Any) -> Any:
            raise heapline.UnavailableError("the server is gone")
            yield

        async def close(self) -> None: ...

    environment.set.setattr(ConnectedBroker, "_connect", lambda self, endpoint: Wire())

    async def read() -> None:
        hl = heapline.connect("a:1", deadline=0.01)
        async for _ in hl.replay("t") if read_again else hl.read_log("t"):
            pass

    asyncio.run(read())


def worker(**settings: Any) -> Any:
    return task(plain).app.worker(**settings)


class Environment:
    """Objects that a case may change and the test restores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.set, self.path = monkeypatch, tmp_path

    def named(self, **values: str) -> None:
        for name, value in values.items():
            self.set.setenv(name, value)

    def file(self, text: str) -> str:
        (self.path / "file").write_text(text)
        return str(self.path / "file")

    def app_with_os_error(self) -> None:
        def fail(name: str) -> None:
            raise FileNotFoundError(2, "No such file or directory", "settings.ini")

        self.set.setattr(worker_cli.importlib, "import_module", fail)
        worker_cli.load_app("tasks:app")

    def http_without_httpx(self) -> None:
        self.set.setitem(sys.modules, "httpx", None)
        self.set.delitem(sys.modules, "heapline.client.transports.http", raising=False)
        asyncio.run(heapline.connect("http://a", api_key="hl_key").list_topics())

    def many_processes(self) -> None:
        self.set.setattr(worker_cli, "load_app", lambda where: heapline.App(Path("./data")))
        worker_cli._check_shared("tasks:app")


Cause = Callable[[Environment], Any]
CASES: list[tuple[str, Cause]] = [
    # -- connecting
    ("deadline must be from 0.001 to 43200 seconds (12 hours), got 86400",
     lambda e: heapline.connect("localhost:1", deadline=86400)),
    ("HEAPLINE_URL does not name a server; write host:port",
     lambda e: (e.named(HEAPLINE_URL=","), heapline.connect_from_env())),
    ("HEAPLINE_API_KEY_FILE or admin.key: the file must contain one API key and nothing else",
     lambda e: (e.named(HEAPLINE_API_KEY_FILE=e.file("a\nb")), heapline.connect_from_env())),
    ("HEAPLINE_API_KEY_FILE cannot be read: No such file",
     lambda e: (e.named(HEAPLINE_API_KEY_FILE=str(e.path / "no")), heapline.connect_from_env())),
    ("give target or endpoints=[…], not both", lambda e: heapline.connect("a:1", endpoints=["b:1"])),
    ("endpoints must be a list of servers, got 'a:1'; pass a single server as target",
     lambda e: heapline.connect(endpoints="a:1")),
    ("endpoints is empty; name at least one server as host:port", lambda e: heapline.connect(endpoints=[])),
    ("a server must be host:port, got 7400",
     lambda e: heapline.connect(endpoints=[7400])),  # type: ignore[list-item]
    ("api_key must be the text that `heapline keys create` printed, without line breaks",
     lambda e: heapline.connect(api_key="a\nb")),
    ("'ftp://a' is not a server; write host:port, heapline+tls://host:port (TLS), unix:///path, or http://host:port",
     lambda e: parse_target("ftp://a")),
    ("'heapline://a' does not use TLS, but TLS files are given; write heapline+tls:// or https://",
     lambda e: parse_target("heapline://a", ClientTls())),
    ("'unix://a' does not name a socket; write unix:///path", lambda e: parse_target("unix://a")),
    ("'heapline+tls://' does not name a server; write host:port, heapline+tls://host:port (TLS), unix:///path, or "
     "http://host:port", lambda e: heapline.connect("heapline+tls://")),
    ("a client certificate needs its key, and a key its certificate; give both or neither",
     lambda e: ClientTls(certificate="x").context()),
    ("cannot read a TLS file: [Errno 2]", lambda e: ClientTls(ca=e.path / "no").context()),
    ("this needs the native wire; name the server as host:port, not as http://…",
     lambda e: BlockingCalls(["http://a"], None)),
    ("http://a needs httpx; run pip install 'heapline[client-http]', or name the server as host:port",
     lambda e: e.http_without_httpx()),
    ("this client belongs to another event loop, which is still open; connect once per event loop, or use "
     "heapline.connect_sync from several threads", lambda e: two_loops()),
    ("ReadLog failed after 0.01 s: the connection broke (the server is gone)", log_that_breaks),
    ("Replay failed after 0.01 s: the connection broke (the server is gone)", lambda e: log_that_breaks(e, True)),
    # -- calls
    ("a batch holds heapline.Outgoing(…), got bytes",
     lambda e: run(lambda: heapline.connect("a:1").enqueue_batch("t", [b"x"]))),  # type: ignore[list-item]
    ("this consumer is closed", lambda e: run(closed_consumer)),
    ("prefetch must be an integer from 0 to 100000, got -1",
     lambda e: run(lambda: heapline.connect("a:1").consume("t", prefetch=-1))),
    # -- payloads
    ("cannot decode the payload: Expected `int`, got `str`",
     lambda e: payload_codec.decode(b'"a"', None, int)),
    ("cannot decode the payload: it is nested too deeply",
     lambda e: payload_codec.decode(b"[" * 100_000, None)),
    ("the payload is 'image/png', which is not JSON; read it from m.payload",
     lambda e: payload_codec.decode(b"", "image/png")),
    ("cannot encode object as JSON; use a dataclass, a msgspec.Struct, a pydantic model, or plain values",
     lambda e: payload_codec.write_foreign(object())),
    ("no way to read a object is known", lambda e: payload_codec.read_foreign(object, 1)),
    # -- tasks
    ("unknown must be \"retry\" or \"bury\", got 'x'", lambda e: heapline.App(unknown="x")),  # type: ignore[arg-type]
    ("task 'plain' already exists (tests.unit.client.test_error_texts.plain); give this one a name, "
     "@app.task(name=…)",
     lambda e: twice()),
    ("task 'many' has *numbers: 'int'; every argument of a task must have a name", lambda e: task(many)),
    ("task 'reserved' has a parameter 'priority', which is an option of enqueue; rename it", lambda e: task(reserved)),
    ("task 'astray' has an annotation that cannot be resolved (name 'Missing' is not defined); the worker decodes "
     "arguments by their annotations, so import the names at run time too",
     lambda e: task(astray).codec.check()),
    ("task 'variant' has an annotation that JSON cannot be decoded to: ", lambda e: task(variant).codec.check()),
    ("task plain(n: 'int') -> 'None': too many positional arguments", lambda e: task(plain).item(1, 2)),
    ("task plain(n: 'int') -> 'None': the worker would reject these arguments: Expected `int`, got `str` - "
     "at `$.n`",
     lambda e: run(lambda: task(plain).enqueue("a"))),
    ("task plain(n: 'int') -> 'None': cannot encode object as JSON",
     lambda e: run(lambda: task(plain).enqueue(object()))),
    ("the payload is not a call of task 'plain': Object missing required field `n`",
     lambda e: Arguments("plain", plain).decode(b"{}")),
    ("target of an App must be a server, a directory or a broker, got 5",
     lambda e: heapline.App(5)),  # type: ignore[arg-type]
    ('api_key needs the server that it is for; write App("heapline+tls://host", api_key=…)',
     lambda e: heapline.App(api_key="k")),
    ("plain.enqueue_sync would block the running event loop; use `await plain.enqueue(…)`",
     lambda e: run(lambda: task(plain).enqueue_sync(1))),
    ("'read_log' cannot be used from another event loop than its broker's",
     lambda e: Elsewhere(Home("./d"), None).read_log),  # type: ignore[arg-type]
    ("retry_on must name exception classes, got 5", lambda e: task(plain, retry_on=[5])),
    ("Retry(delay=…) must be seconds from 0, a heapline.Backoff, or None for the topic's, got -1",
     lambda e: Retry(delay=-1)),
    ("timeout of task 'plain' must be a number of seconds over 0, got 0", lambda e: task(plain, timeout=0)),
    ("enqueue_many has no option 'headers'; it has delay, deliver_at,",
     lambda e: run(lambda: task(plain).enqueue_many([1], headers={}))),
    ("this app has no tasks; declare some with @app.task in a module that is imported",
     lambda e: heapline.App().worker()),
    ("no task of this app is on topic 'x'; its topics are t", lambda e: worker(topics=["x"])),
    ("concurrency must be an integer from 1 to 10000, got 0", lambda e: worker(concurrency=0)),
    ("visibility must be a number of seconds over 0, got 0", lambda e: worker(visibility=0)),
    ("grace must be a number of seconds from 0, got -1", lambda e: worker(grace=-1)),
    # -- heapline worker
    ("'tasks' is not an app; use module:name, such as proj.tasks:app", lambda e: worker_cli.load_app("tasks")),
    ("module 'nowhere_at_all' cannot be imported; run the command in the directory that contains it",
     lambda e: worker_cli.load_app("nowhere_at_all:app")),
    ("cannot import 'tasks'", Environment.app_with_os_error),
    ("module 'heapline' has no 'application'", lambda e: worker_cli.load_app("heapline:application")),
    ("'heapline:open' is a function, not a heapline.App", lambda e: worker_cli.load_app("heapline:open")),
    ("'tasks:app' opens its queue in its own process (data), which several processes cannot share; run `heapline "
     "serve` and set HEAPLINE_URL, or use --processes 1", Environment.many_processes),
    # -- outbox
    ("the outbox writes through a SQLAlchemy session or connection, not str", lambda e: outbox.enqueue("x", "t", b"")),
    ("key of a row of the outbox must be at most 1024 characters, without NUL; not every database can store it",
     lambda e: outbox.enqueue(None, "t", b"", key="a\0b")),
    ("enqueue has no option 'seq'; it has priority, key, delay,", lambda e: outbox.enqueue(None, "t", b"", seq=1)),  # type: ignore[call-arg]
    ("enqueue_call needs a call of a task, such as send.item(…), got str", lambda e: fields_of("send")),
    ("a row of the outbox is enqueued exactly once without a key; omit idempotency_key",
     lambda e: fields_of(task(plain).item(1, idempotency_key="k"))),
    ("this row is not a message (JSONDecodeError); use outbox.enqueue",
     lambda e: sender._outgoing(Row(1, 1, 0, "t", b"", 0, None, None, "{", None, None, None))),
    ("give a server or a data directory, not both", lambda e: relay.broker_of("a:1", "./data", None)),
]  # fmt: skip
_reached: set[tuple[str, int]] = set()


@pytest.mark.parametrize(("text", "cause"), CASES, ids=[text[:50] for text, _ in CASES])
def test_error_has_this_text(text: str, cause: Cause, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert text in str(met(cause, Environment(monkeypatch, tmp_path)))


def met(cause: Cause, environment: Environment) -> BaseException:
    try:
        cause(environment)
    except BaseException as error:
        for frame in traceback.extract_tb(error.__traceback__):
            assert frame.lineno is not None
            _reached.add((frame.filename, frame.lineno))
        return error
    pytest.fail("nothing was raised")


def sites() -> Iterator[tuple[Path, ast.Raise, str]]:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = ast.unparse(node.exc.args[0])
                if re.search(r"[a-z]{2}", text) and isinstance(node.exc.args[0], ast.Constant | ast.JoinedStr):
                    yield file, node, text


def test_no_text_is_missing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for _, cause in CASES:  # again: this test may run in a separate process
        with pytest.MonkeyPatch.context() as patch:
            met(cause, Environment(patch, tmp_path))
    missing = [
        f"{file.relative_to(ROOT)}:{node.lineno} {text}"
        for file, node, text in sites()
        if not any(over in text for over in PASSED_OVER)
        and not any((str(file), line) in _reached for line in range(node.lineno, (node.end_lineno or 0) + 1))
    ]
    assert missing == []
    assert len(list(sites())) > 50, "the source was read"
