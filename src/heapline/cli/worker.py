"""`heapline worker proj.tasks:app`: run an app's tasks until told to stop.

One process runs them itself; several, or `--reload`, are children of one that only watches (worker_processes.py).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapline.cli.worker_processes import PARENT_FD, Processes, child_command
from heapline.errors import BadRequest

if TYPE_CHECKING:
    from heapline.client.tasks import App, Worker

WORN_OUT = 75  # exit status: too many handlers hang in this process; start another


def worker(
    app: Annotated[str, typer.Argument(help="Where the app is: module:name, as proj.tasks:app.", metavar="APP")],
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Handlers at once, in each process.")] = 16,
    processes: Annotated[int, typer.Option("--processes", "-p", help="Processes.", min=1, max=1024)] = 1,
    topics: Annotated[str | None, typer.Option(help="Only these topics, separated by commas.")] = None,
    reload: Annotated[bool, typer.Option("--reload", help="Start anew when a source file changes.")] = False,
    reload_dir: Annotated[Path, typer.Option(help="Where source files are looked for.")] = Path(),
    grace: Annotated[float, typer.Option(help="Seconds that handlers may take when it stops.", min=0)] = 30.0,
    visibility: Annotated[float, typer.Option(help="Seconds of a lease; extended while a handler runs.")] = 30.0,
    report: Annotated[float, typer.Option(help="Seconds between lines about what was done.")] = 60.0,
) -> None:
    """Run an app's tasks.

    Example:  [cyan]heapline worker proj.tasks:app --concurrency 16 --processes 4[/cyan]

    Stops on SIGTERM or Ctrl-C: takes no more and finishes what runs; a second
    one ends it at once. SIGUSR1 makes it tell what it has done. [bold]kill -9[/bold] is
    safe too: what it held comes back when its leases end.
    """
    _log_to_stderr()
    if processes > 1 or reload:
        if processes > 1:
            _check_shared(app)
        options = ["--concurrency", str(concurrency), "--grace", str(grace), "--visibility", str(visibility),
                   "--report", str(report), *(["--topics", topics] if topics else [])]  # fmt: skip
        watched = reload_dir.resolve() if reload else None
        raise typer.Exit(Processes(child_command(app, options), processes, grace, watched).run())
    chosen = [topic.strip() for topic in topics.split(",") if topic.strip()] if topics else None
    found = load_app(app)
    running = found.worker(
        concurrency=concurrency, topics=chosen, grace=grace, visibility=visibility, report_interval=report
    )  # fmt: skip
    _tell(app, found, running)
    raise typer.Exit(_run(_work(running)))


def load_app(where: str) -> App:
    """`module:name`, looked for in the current directory too.

    >>> load_app("proj.tasks")
    Traceback (most recent call last):
    heapline.errors.BadRequest: 'proj.tasks' names no app: write module:name, as in proj.tasks:app
    """
    from heapline.client.tasks import App

    module_name, colon, name = where.partition(":")
    if not (module_name and colon and name):
        raise BadRequest(f"{where!r} names no app: write module:name, as in proj.tasks:app")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # what it imports is missing: that is the app's own affair, with its traceback
        raise BadRequest(f"there is no module {error.name!r} here: run this where it can be imported from") from None
    if not hasattr(module, name):
        raise BadRequest(f"module {module_name!r} has no {name!r}")
    found = getattr(module, name)
    if not isinstance(found, App):
        raise BadRequest(f"{where!r} is a {type(found).__name__}, not a heapline.App")
    return found


def _check_shared(where: str) -> None:
    found = load_app(where)
    if found.home.directory is not None or found.home.given is not None:
        raise BadRequest(
            f"{where!r} keeps its queue in a process of its own ({found.home}), which several processes cannot share: "
            "run `heapline serve` and name it in HEAPLINE_URL, or use --processes 1"
        )


def _tell(where: str, app: App, running: Worker) -> None:
    typer.echo(f"heapline worker {where} on {app.home}, {running.slots.count} handlers at once, process {os.getpid()}")
    for topic in running.topics:
        names = ", ".join(task.name for task in app.tasks.values() if task.topic == topic)
        typer.echo(f"  {topic}: {names}")
    sys.stdout.flush()


async def _work(running: Worker) -> int:
    loop = asyncio.get_running_loop()
    told = 0

    def stop() -> None:
        nonlocal told
        told += 1
        if told > 1:
            logging.getLogger("heapline.worker").warning("told twice: ending at once; what runs comes back later")
            os._exit(1)
        running.stop()

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop)
    loop.add_signal_handler(signal.SIGUSR1, running.report)
    if (parent := os.environ.pop(PARENT_FD, None)) is not None:
        os.set_inheritable(int(parent), False)
        loop.add_reader(int(parent), _orphaned, loop, int(parent), stop)
    totals = await running.run()
    log = logging.getLogger("heapline.worker")
    log.info("stopped: %d done in all", totals.done)
    status = WORN_OUT if running.is_worn_out else 0
    if running.running:  # the loop would wait for them, for ever
        log.warning("a handler does not end: its message comes back when its lease ends")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


def _orphaned(loop: asyncio.AbstractEventLoop, parent: int, stop: Any) -> None:
    """The process that watches over us has gone, and its end of the pipe with it."""
    loop.remove_reader(parent)
    stop()


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")


def _run(work: Any) -> int:
    if find_spec("uvloop") is not None:
        import uvloop

        return int(uvloop.run(work))
    return int(asyncio.run(work))
