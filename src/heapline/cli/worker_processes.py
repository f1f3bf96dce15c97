"""Several worker processes under one that watches: starts them, restarts those that die, and ends them together.

It runs no task and holds no connection, so nothing that a task does can hurt it. Children lie in process groups of
their own, so that Ctrl-C reaches them once, from here. Each holds the end of a pipe: when this process is gone, even
by kill -9, they finish what they have and go too.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from heapline.cli.reloading import SourceWatch

log = logging.getLogger("heapline.worker")
PARENT_FD = "HEAPLINE_WORKER_PARENT_FD"
PAUSE_MAX = 30.0  # seconds before a child that keeps dying is started again
SETTLED = 60.0  # seconds of life after which a death counts as the first
LOOK = 0.25  # seconds between looks at children and files
KILL_AFTER = 10.0  # seconds past the grace after which a child is killed


def child_command(app: str, options: list[str]) -> list[str]:
    return [sys.executable, "-m", "heapline", "worker", app, *options]


class Place:
    """One of the processes, in whatever incarnation."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.deaths = 0  # one after the other, without a settled life between
        self.start_at = 0.0


class Processes:
    def __init__(self, command: list[str], count: int, grace: float, watched: Path | None = None) -> None:
        self._command = command
        self._places = [Place() for _ in range(count)]
        self._grace = grace
        self._watch = SourceWatch(watched) if watched is not None else None
        self._signals = 0
        self._ends: dict[int, int] = {}  # pid -> our end of its pipe

    def run(self) -> int:
        """Until told to stop; the exit status."""
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, self._told)
        signal.signal(signal.SIGUSR1, lambda *_: self._tell_all(signal.SIGUSR1))
        log.info("watching over %d worker process(es)%s", len(self._places), ", reloading" if self._watch else "")
        while not self._signals:
            for place in self._places:
                self._tend(place)
            if self._watch is not None and (changed := self._watch.changed()) is not None:
                log.info("%s has changed: starting anew", changed)
                self._renew()
            time.sleep(LOOK)
        return self._end()

    def _told(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self._tell_all(signal.SIGTERM)  # their second one: they end at once

    def _tell_all(self, sign: int) -> None:
        for place in self._places:
            if place.process is not None and place.process.poll() is None:
                place.process.send_signal(sign)

    # -- lives -----------------------------------------------------------------------------------------------------

    def _tend(self, place: Place) -> None:
        now = time.monotonic()
        if place.process is not None:
            status = place.process.poll()
            if status is None:
                return
            self._bury(place)
            place.deaths = 1 if now - place.started > SETTLED else place.deaths + 1
            pause = min(PAUSE_MAX, 0.25 * 2 ** (place.deaths - 1))
            place.start_at = now + pause
            log.warning("a worker process ended (%s); starting another in %.2f s", _ending(status), pause)
        if now >= place.start_at:
            self._start(place)

    def _start(self, place: Place) -> None:
        theirs, ours = os.pipe()
        environment = {**os.environ, PARENT_FD: str(theirs)}
        # What is ignored here is ignored there too, until the child listens: a question must not end it before.
        answers = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        place.process = subprocess.Popen(
            self._command, env=environment, pass_fds=(theirs,), process_group=0, stdin=subprocess.DEVNULL
        )  # fmt: skip
        signal.signal(signal.SIGUSR1, answers)
        os.close(theirs)
        self._ends[place.process.pid] = ours
        place.started = time.monotonic()

    def _bury(self, place: Place) -> None:
        assert place.process is not None
        os.close(self._ends.pop(place.process.pid))
        place.process = None

    def _renew(self) -> None:
        """New code for all: the old ones finish what they run, then the new ones start."""
        self._tell_all(signal.SIGTERM)
        self._wait_for_all()
        for place in self._places:
            place.deaths, place.start_at = 0, 0.0

    def _end(self) -> int:
        self._tell_all(signal.SIGTERM)
        self._wait_for_all()
        log.info("all worker processes have ended")
        return 0 if self._signals <= 1 else 1

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self._grace + KILL_AFTER
        for place in self._places:
            if place.process is None:
                continue
            try:
                place.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("worker process %d does not end: killing it", place.process.pid)
                place.process.kill()
                place.process.wait()
            self._bury(place)


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
