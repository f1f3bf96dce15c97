"""`heapline worker proj.tasks:app`: run an app's tasks until it is stopped.

One process runs them itself. With several processes, or with `--reload`, this process only supervises its children:
it runs no task and has no connection, so a task cannot break it. Each child holds the end of a pipe. When the
supervisor is gone, even by kill -9, the children finish their messages and exit.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import Meta

from heapline.cli.serve import run_fast, tune_garbage_collection
from heapline.contract.errors import BadRequest

if TYPE_CHECKING:
    from heapline.client.tasks import App, Worker

log = logging.getLogger("heapline.worker")
WORN_OUT = 75  # exit status: too many handlers hang in this process; start another
PARENT_FD = "HEAPLINE_WORKER_PARENT_FD"
RESTART_SECONDS_MAX = 30.0  # before a child that keeps dying is started again
STABLE_SECONDS = 60.0  # lifetime after which a death counts as the first
POLL_SECONDS = 0.25  # between checks of children and files
KILL_SECONDS = 10.0  # past the grace period, until a child is killed
IGNORED_DIRECTORIES = {"__pycache__", "node_modules", "venv", "site-packages"}


def worker(
    app: Annotated[str, typer.Argument(help="The app, as module:name, such as proj.tasks:app.", metavar="APP")],
    concurrency: Annotated[int, "-c", "Concurrent handlers per process."] = 16,
    processes: Annotated[int, "-p", "Number of processes.", Meta(ge=1, le=1024)] = 1,
    topics: Annotated[str | None, "Only these topics, separated by commas."] = None,
    reload: Annotated[bool, "Restart the workers when a source file changes."] = False,
    reload_dir: Annotated[Path, "Directory of the source files to watch."] = Path(),
    grace: Annotated[float, "Seconds that running handlers get when it stops.", Meta(ge=0)] = 30.0,
    visibility: Annotated[float, "Seconds of a lease; extended while its handler runs."] = 30.0,
    report: Annotated[float, "Seconds between log lines with totals."] = 60.0,
) -> None:
    """Run the tasks of an app.

    Example:  [cyan]heapline worker proj.tasks:app --concurrency 16 --processes 4[/cyan]

    SIGTERM or Ctrl-C stops it: it takes no more messages and finishes the
    running ones; a second signal exits immediately. SIGUSR1 logs totals.
    [bold]kill -9[/bold] is safe too: its messages are redelivered when their leases end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    if processes > 1 or reload:
        if processes > 1:
            _check_shared(app)
        options = {"concurrency": concurrency, "grace": grace, "visibility": visibility, "report": report}
        command = [sys.executable, "-m", "heapline", "worker", app, *(["--topics", topics] if topics else [])]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        watched = reload_dir.resolve() if reload else None
        raise typer.Exit(Supervisor(command, processes, grace, watched).run())
    chosen = [topic.strip() for topic in topics.split(",") if topic.strip()] if topics else None
    tasks = load_app(app)
    running = tasks.worker(
        concurrency=concurrency, topics=chosen, grace=grace, visibility=visibility, report_interval=report
    )
    _print_start(app, tasks, running)
    tune_garbage_collection()
    raise typer.Exit(int(run_fast(_work(running))))


def load_app(where: str) -> App:
    """Import `module:name`, from the current directory too.

    >>> load_app("proj.tasks")
    Traceback (most recent call last):
    heapline.contract.errors.BadRequest: 'proj.tasks' is not an app; use module:name, such as proj.tasks:app
    """
    from heapline.client.tasks import App

    module_name, colon, name = where.partition(":")
    if not (module_name and colon and name):
        raise BadRequest(f"{where!r} is not an app; use module:name, such as proj.tasks:app")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the app imports a missing module: show the app's own traceback
        raise BadRequest(
            f"module {error.name!r} cannot be imported; run the command in the directory that contains it"
        ) from None
    except OSError as error:
        raise ImportError(f"cannot import {module_name!r}") from error  # a bug of the app: show its traceback
    if not hasattr(module, name):
        raise BadRequest(f"module {module_name!r} has no {name!r}")
    app = getattr(module, name)
    if not isinstance(app, App):
        raise BadRequest(f"{where!r} is a {type(app).__name__}, not a heapline.App")
    return app


def _check_shared(where: str) -> None:
    app = load_app(where)
    if app.home.directory is not None or app.home.given is not None:
        raise BadRequest(
            f"{where!r} opens its queue in its own process ({app.home}), which several processes cannot share; run "
            "`heapline serve` and set HEAPLINE_URL, or use --processes 1"
        )


def _print_start(where: str, app: App, running: Worker) -> None:
    typer.echo(f"heapline worker {where} on {app.home}, {running.slots.count} handlers at once, process {os.getpid()}")
    for topic in running.topics:
        names = ", ".join(task.name for task in app.tasks.values() if task.topic == topic)
        typer.echo(f"  {topic}: {names}")
    sys.stdout.flush()


async def _work(running: Worker) -> int:
    loop = asyncio.get_running_loop()
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            log.warning("second signal: exiting now; running messages will be redelivered")
            os._exit(1)
        running.stop()

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop)
    loop.add_signal_handler(signal.SIGUSR1, running.report)
    if (parent := os.environ.pop(PARENT_FD, None)) is not None:
        os.set_inheritable(int(parent), False)
        loop.add_reader(int(parent), _stop_orphan, loop, int(parent), stop)
    totals = await running.run()
    log.info("stopped: %d done in all", totals.done)
    status = WORN_OUT if running.is_worn_out else 0
    if running.running:  # the event loop would wait for these handlers forever
        log.warning("a handler does not end; its message will be redelivered when its lease ends")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


def _stop_orphan(loop: asyncio.AbstractEventLoop, parent: int, stop: Any) -> None:
    """Stop, because the supervisor is gone and has closed its end of the pipe."""
    loop.remove_reader(parent)
    stop()


# -- several processes -------------------------------------------------------------------------------------------------


class Slot:
    """One of the processes, across its restarts."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.deaths = 0  # consecutive deaths, without a stable lifetime in between
        self.start_at = 0.0


class Supervisor:
    """Starts worker processes, restarts those that die, and stops them together."""

    def __init__(self, command: list[str], count: int, grace: float, watched: Path | None = None) -> None:
        self._command = command
        self._slots = [Slot() for _ in range(count)]
        self._grace = grace
        self._watch = SourceWatch(watched) if watched is not None else None
        self._signals = 0
        self._pipes: dict[int, int] = {}  # pid -> our end of its pipe

    def run(self) -> int:
        """Run until a signal arrives. Return the exit status."""
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, self._on_signal)
        signal.signal(signal.SIGUSR1, lambda *_: self._signal_all(signal.SIGUSR1))
        log.info("supervising %d worker process(es)%s", len(self._slots), ", with reload" if self._watch else "")
        while not self._signals:
            for slot in self._slots:
                self._restart_if_dead(slot)
            if self._watch is not None and (changed := self._watch.changed()) is not None:
                log.info("%s changed; restarting workers", changed)
                self._stop_all()
                for slot in self._slots:
                    slot.deaths, slot.start_at = 0, 0.0
            time.sleep(POLL_SECONDS)
        self._stop_all()
        log.info("all worker processes have ended")
        return 0 if self._signals <= 1 else 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self._signal_all(signal.SIGTERM)  # their second signal: they exit immediately

    def _signal_all(self, sign: int) -> None:
        for slot in self._slots:
            if slot.process is not None and slot.process.poll() is None:
                slot.process.send_signal(sign)

    def _restart_if_dead(self, slot: Slot) -> None:
        now = time.monotonic()
        if slot.process is not None:
            status = slot.process.poll()
            if status is None:
                return
            self._release(slot)
            slot.deaths = 1 if now - slot.started > STABLE_SECONDS else slot.deaths + 1
            pause = min(RESTART_SECONDS_MAX, 0.25 * 2 ** (slot.deaths - 1))
            slot.start_at = now + pause
            ending = f"signal {-status}" if status < 0 else f"exit status {status}"
            log.warning("a worker process ended (%s); starting another in %.2f s", ending, pause)
        if now >= slot.start_at:
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        theirs, ours = os.pipe()
        environment = {**os.environ, PARENT_FD: str(theirs)}
        # The child inherits ignored signals, so SIGUSR1 cannot kill it before it has installed its handler.
        handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        # A process group of its own: Ctrl-C reaches the child once, from here.
        slot.process = subprocess.Popen(
            self._command, env=environment, pass_fds=(theirs,), process_group=0, stdin=subprocess.DEVNULL
        )
        signal.signal(signal.SIGUSR1, handler)
        os.close(theirs)
        self._pipes[slot.process.pid] = ours
        slot.started = time.monotonic()

    def _release(self, slot: Slot) -> None:
        assert slot.process is not None
        os.close(self._pipes.pop(slot.process.pid))
        slot.process = None

    def _stop_all(self) -> None:
        """Let all processes finish their messages, and kill those that do not end."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._grace + KILL_SECONDS
        for slot in self._slots:
            if slot.process is None:
                continue
            try:
                slot.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("worker process %d does not end; killing it", slot.process.pid)
                slot.process.kill()
                slot.process.wait()
            self._release(slot)


class SourceWatch:
    """Detects changed `.py` files below a directory, except in hidden directories and installed packages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = self._scan()

    def changed(self) -> str | None:
        """Return a file that was added, removed or changed since the last check."""
        before, self._known = self._known, self._scan()
        paths = sorted(before.keys() | self._known)
        return next((path for path in paths if before.get(path) != self._known.get(path)), None)

    def _scan(self) -> dict[str, tuple[int, int]]:
        files: dict[str, tuple[int, int]] = {}
        for directory, names, entries in os.walk(self._directory):
            names[:] = [n for n in names if not n.startswith(".") and n not in IGNORED_DIRECTORIES]
            for name in entries:
                if name.endswith(".py"):
                    path = os.path.join(directory, name)
                    try:
                        status = os.stat(path)
                    except FileNotFoundError:
                        continue  # removed meanwhile
                    files[os.path.relpath(path, self._directory)] = (status.st_mtime_ns, status.st_size)
        return files
