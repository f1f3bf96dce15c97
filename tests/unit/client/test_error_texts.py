"""Every text that the SDK, tasks and outbox raise is met here once, and says what to do. None may be missing.

The sites are read from the source: a `raise` with a text of its own that no case below reaches fails the last test.
"""

from __future__ import annotations

import ast
import asyncio
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import heapline
from heapline import contents
from heapline.cli import worker as worker_cli
from heapline.client import forking, outbox
from heapline.client.http import HttpBroker
from heapline.client.outbox import sending, serving
from heapline.client.outbox.rows import Row, fields_of
from heapline.client.sdk import ConnectedBroker
from heapline.client.session import Session
from heapline.client.target import ClientTls, parse_target
from heapline.client.tasks import home as task_home
from heapline.client.tasks.encoding import Arguments
from heapline.client.tasks.home import Elsewhere, Home
from heapline.client.tasks.outcomes import Retry

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

ROOT = Path(heapline.__file__).parent
FILES = [*ROOT.glob("client/**/*.py"), ROOT / "cli/worker.py", ROOT / "contents.py"]
#: Not for a user's eyes, and why.
PASSED_OVER = {
    "unreachable: pauses never end": "for those who read the code",
    "a call that has ended keeps its status to itself": "a bug of gRPC's",
    "rows were claimed by two at once: this database does not lock them": "a database that breaks its promise",
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


def silent_server() -> None:
    class Stream:
        def add_done_callback(self, told: Any) -> None: ...

        async def write(self, request: Any) -> None: ...

        async def read(self) -> Any:
            await asyncio.sleep(3600)

    async def call() -> None:
        await Session(lambda: Stream(), lambda *_: None).call("Pop", b"", 0.001)

    asyncio.run(call())


def log_that_breaks(environment: Environment, read_again: bool = False) -> None:
    class Wire:
        async def stream(self, name: str, request: Any) -> Any:
            raise heapline.UnavailableError("the server is gone")
            yield

        async def close(self) -> None: ...

    environment.set.setattr(ConnectedBroker, "_make_calls", lambda self, endpoint: Wire())

    async def read() -> None:
        hl = heapline.connect("a:1", deadline=0.01)
        async for _ in hl.replay("t") if read_again else hl.read_log("t"):
            pass

    asyncio.run(read())


def worker(**settings: Any) -> Any:
    return task(plain).app.worker(**settings)


class Environment:
    """What a case may change, and the test puts back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.set, self.path = monkeypatch, tmp_path

    def named(self, **values: str) -> None:
        for name, value in values.items():
            self.set.setenv(name, value)

    def file(self, text: str) -> str:
        (self.path / "file").write_text(text)
        return str(self.path / "file")

    def forked(self) -> None:
        self.set.setattr(forking, "_USED_BY", [1])
        forking.check_process()

    def without_grpc(self) -> None:
        self.set.setitem(__import__("sys").modules, "grpc", None)
        heapline.connect()

    def app_without_grpc(self) -> None:
        self.set.setattr(task_home, "find_spec", lambda name: None)
        task_home.make_client("localhost:1")

    def many_processes(self) -> None:
        self.set.setattr(worker_cli, "load_app", lambda where: heapline.App(Path("./data")))
        worker_cli._check_shared("tasks:app")


Cause = Callable[[Environment], Any]
CASES: list[tuple[str, Cause]] = [
    # -- connecting
    ("deadline is a number of seconds from 0.001 to 43200 (12 hours), not 86400",
     lambda e: heapline.connect("localhost:1", deadline=86400)),
    ("HEAPLINE_URL names no server: write host:port",
     lambda e: (e.named(HEAPLINE_URL=","), heapline.connect_from_env())),
    ("HEAPLINE_API_KEY_FILE or admin.key: the file must hold one API key and nothing else",
     lambda e: (e.named(HEAPLINE_API_KEY_FILE=e.file("a\nb")), heapline.connect_from_env())),
    ("HEAPLINE_API_KEY_FILE cannot be read: No such file",
     lambda e: (e.named(HEAPLINE_API_KEY_FILE=str(e.path / "no")), heapline.connect_from_env())),
    ("give a target or endpoints=[…], not both", lambda e: heapline.connect("a:1", endpoints=["b:1"])),
    ("endpoints is a list of servers, not 'a:1'; a single one goes first: connect(…)",
     lambda e: heapline.connect(endpoints="a:1")),
    ("endpoints is empty: name at least one server as host:port", lambda e: heapline.connect(endpoints=[])),
    ("a server is written host:port, not 7400",
     lambda e: heapline.connect(endpoints=[7400])),  # type: ignore[list-item]
    ("api_key is the text that `heapline keys create` printed: not empty, without line breaks",
     lambda e: heapline.connect(api_key="a\nb")),
    ("heapline.connect speaks gRPC: install it with `pip install 'heapline[client]'`", Environment.without_grpc),
    ("'http://a': a server is heaplines://host:port (TLS) or heapline://host:port", lambda e: parse_target("http://a")),
    ("'heapline://a' is not over TLS, but TLS files are given: write heaplines://a",
     lambda e: parse_target("heapline://a", ClientTls())),
    ("'heaplines://' names no server: write heaplines://host:port", lambda e: heapline.connect("heaplines://")),
    ("a client certificate and its key go together: give both, or neither",
     lambda e: ClientTls(certificate="x").credentials()),
    ("a TLS file cannot be read: [Errno 2]", lambda e: ClientTls(ca=e.path / "no").credentials()),
    ("this process was forked from one that had already used a Heapline client, and gRPC does not survive that: use "
     "clients only after the fork (connect() alone does not connect), or start processes with 'spawn'",
     Environment.forked),
    ("this client belongs to another event loop, which is still open: connect once for each loop, or use "
     "heapline.connect_sync from several threads", lambda e: two_loops()),
    ("Pop was not answered within 0.001 s: it may have been done", lambda e: silent_server()),
    ("ReadLog was given up after 0.01 s: the connection broke (the server is gone)", log_that_breaks),
    ("Replay was given up after 0.01 s: the connection broke (the server is gone)", lambda e: log_that_breaks(e, True)),
    # -- calls
    ("a batch holds heapline.Outgoing(…), not bytes",
     lambda e: run(lambda: heapline.connect("a:1").enqueue_batch("t", [b"x"]))),  # type: ignore[list-item]
    ("parts is a list of part names, not 'p'", lambda e: run(lambda: heapline.connect("a:1").commit_batch("b", "p"))),
    ("throttled is True or False, not 1",
     lambda e: run(lambda: heapline.connect("a:1").set_partition_throttled("t", 0, 1))),  # type: ignore[arg-type]
    ("rate is messages a second, over 0 and at most 1e6, not 0",
     lambda e: run(lambda: heapline.connect("a:1").dlq_replay("t", rate=0))),
    # -- groups
    ('a place in a stream is "earliest", "latest", an offset, a datetime with its time zone, or {partition: offset}, '
     "not 'middle'", lambda e: run(lambda: heapline.connect("a:1").reset_offsets("t", "g", to="middle"))),
    ("rows are given as {partition: [offsets]}, not as list",
     lambda e: run(lambda: heapline.connect("a:1").group_ack("t", "g", "m", [1], session="s"))),  # type: ignore[arg-type]
    ("offsets are a list of ints from 0 on, not '[-1]'",
     lambda e: run(lambda: heapline.connect("a:1").group_ack("t", "g", "m", {0: [-1]}, session="s"))),
    ("an argument does not fit: ",
     lambda e: run(lambda: heapline.connect("a:1").get_group("t", 5))),  # type: ignore[arg-type]
    ("'a b' is not a group name", lambda e: run(lambda: HttpBroker("http://a:1").create_group("t", "a b"))),
    # -- payloads
    ("the payload does not fit: Expected `int`, got `str`", lambda e: contents.decode(b'"a"', None, int)),
    ("the payload is 'image/png', which only you can read: take it from m.payload",
     lambda e: contents.decode(b"", "image/png")),
    ("a object has no form in JSON: use a dataclass, a msgspec.Struct, a pydantic model, or plain values",
     lambda e: contents.write_foreign(object())),
    ("no way to read a object is known", lambda e: contents.read_foreign(object, 1)),
    # -- tasks
    ("unknown=\"retry\" or unknown=\"bury\", not 'x'", lambda e: heapline.App(unknown="x")),  # type: ignore[arg-type]
    ("there is a task 'plain' already, tests.unit.client.test_error_texts.plain: give this one a name, "
     "@app.task(name=…)",
     lambda e: twice()),
    ("task 'many' takes *numbers: 'int': every argument of a task needs a name of its own", lambda e: task(many)),
    ("task 'reserved' has a parameter 'priority', which is an option of enqueue: rename it", lambda e: task(reserved)),
    ("task 'astray' has an annotation that cannot be found (name 'Missing' is not defined): the worker reads arguments "
     "by their annotations, so import what they name, not only for type checkers",
     lambda e: task(astray).codec.check()),
    ("task 'variant' has an annotation that JSON cannot be read by: ", lambda e: task(variant).codec.check()),
    ("task plain(n: 'int') -> 'None': too many positional arguments", lambda e: task(plain).item(1, 2)),
    ("task plain(n: 'int') -> 'None': these arguments would not fit at the worker: Expected `int`, got `str` - "
     "at `$.n`",
     lambda e: run(lambda: task(plain).enqueue("a"))),
    ("task plain(n: 'int') -> 'None': a object has no form in JSON",
     lambda e: run(lambda: task(plain).enqueue(object()))),
    ("this is no call of task 'plain': Object missing required field `n`",
     lambda e: Arguments("plain", plain).decode(b"{}")),
    ("a server is reached over gRPC, which is not installed: pip install 'heapline[client]'",
     Environment.app_without_grpc),
    ("an App's target is a server, a directory or a broker, not 5",
     lambda e: heapline.App(5)),  # type: ignore[arg-type]
    ('api_key goes with the server that it is for: App("heaplines://host", api_key=…)',
     lambda e: heapline.App(api_key="k")),
    ("plain.enqueue_sync would block the event loop that runs here: use `await plain.enqueue(…)`",
     lambda e: run(lambda: task(plain).enqueue_sync(1))),
    ("'read_log' of a broker that lives in another event loop",
     lambda e: Elsewhere(Home("./d"), None).read_log),  # type: ignore[arg-type]
    ("retry_on names exception classes, not 5", lambda e: task(plain, retry_on=[5])),
    ("Retry(delay=…) is seconds from 0, a heapline.Backoff, or None for the topic's, not -1",
     lambda e: Retry(delay=-1)),
    ("timeout=0 of task 'plain': it is seconds, over 0", lambda e: task(plain, timeout=0)),
    ("enqueue_many has no option 'headers'; it has delay, deliver_at,",
     lambda e: run(lambda: task(plain).enqueue_many([1], headers={}))),
    ("this app has no tasks: declare some with @app.task in a module that is imported",
     lambda e: heapline.App().worker()),
    ("no task of this app is on topic 'x'; its topics are t", lambda e: worker(topics=["x"])),
    ("concurrency=0: it is 1 to 10000 handlers at once", lambda e: worker(concurrency=0)),
    ("visibility=0: it is seconds, over 0", lambda e: worker(visibility=0)),
    ("grace=-1: it is seconds, from 0", lambda e: worker(grace=-1)),
    # -- heapline worker
    ("'tasks' names no app: write module:name, as in proj.tasks:app", lambda e: worker_cli.load_app("tasks")),
    ("there is no module 'nowhere_at_all' here: run this where it can be imported from",
     lambda e: worker_cli.load_app("nowhere_at_all:app")),
    ("module 'heapline' has no 'application'", lambda e: worker_cli.load_app("heapline:application")),
    ("'heapline:open' is a function, not a heapline.App", lambda e: worker_cli.load_app("heapline:open")),
    ("'tasks:app' keeps its queue in a process of its own (data), which several processes cannot share: run `heapline "
     "serve` and name it in HEAPLINE_URL, or use --processes 1", Environment.many_processes),
    # -- outbox
    ("the outbox writes through a SQLAlchemy session or connection, not str", lambda e: outbox.enqueue("x", "t", b"")),
    ("key of a row of the outbox is at most 1024 characters, without NUL: not every database would keep it as it is",
     lambda e: outbox.enqueue(None, "t", b"", key="a\0b")),
    ("enqueue_call takes a call of a task, as send.item(…) makes it, not str", lambda e: fields_of("send")),
    ("a row of the outbox is enqueued once by itself: leave idempotency_key out",
     lambda e: fields_of(task(plain).item(1, idempotency_key="k"))),
    ("this row is no message (JSONDecodeError): write it with outbox.enqueue",
     lambda e: sending._outgoing(Row(1, 1, 0, "t", b"", 0, None, None, "{", None, None, None))),
    ("give a server or a data directory, not both", lambda e: serving.broker_of("a:1", "./data", None)),
]  # fmt: skip
_reached: set[tuple[str, int]] = set()


@pytest.mark.parametrize(("text", "cause"), CASES, ids=[text[:50] for text, _ in CASES])
def test_error_says_this(text: str, cause: Cause, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    for _, cause in CASES:  # again: this test may run in a process of its own
        with pytest.MonkeyPatch.context() as patch:
            met(cause, Environment(patch, tmp_path))
    missing = [
        f"{file.relative_to(ROOT)}:{node.lineno} {text}"
        for file, node, text in sites()
        if not any(over in text for over in PASSED_OVER)
        and not any((str(file), line) in _reached for line in range(node.lineno, (node.end_lineno or 0) + 1))
    ]
    assert missing == []
    assert len(list(sites())) > 50, "the source is read as it is"
