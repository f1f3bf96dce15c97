"""Jobs in chunks: killed and restarted, every chunk counts once; a different job is rejected."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.contract.errors import BadRequest, ConflictError
from heapline.spark.jobs.chunked_write import PLAN, JobFolder, check_name, load_or_make_plan, run_chunks


class Killed(BaseException):
    """As good as a kill: nothing of the process's own runs after it."""


@dataclass
class Commit:
    name: str
    version: int
    messages: int


@dataclass
class Server:
    """Remembers the last version of each sink, as the real one does."""

    commits: dict[str, Commit] = field(default_factory=dict)
    there: list[str] = field(default_factory=list)
    die_in: int = -1  # steps until it happens

    def step(self) -> None:
        if self.die_in == 0:
            raise Killed
        self.die_in -= 1

    def sinks(self) -> dict[str, Any]:
        self.step()
        return dict(self.commits)

    def write(self, chunk: Any, app: str, number: int) -> None:
        self.step()
        last = self.commits.get(f"txn:{app}@jobs")
        if chunk and (last is None or last.version < number):
            self.there += chunk
            self.commits[f"txn:{app}@jobs"] = Commit(f"txn:{app}@jobs", number, len(chunk))
        self.step()  # killed after the commit, before the response


def run(folder: JobFolder, server: Server, chunks: list[list[str]], name: str = "job", **more: Any) -> Any:
    with folder.locked():
        plan = load_or_make_plan(folder, "load", name, {"topic": "jobs"}, server.sinks, lambda: (chunks, {}))
        return run_chunks(plan, folder, server.sinks, server.write, **more)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.just("m"), max_size=3), max_size=6), st.lists(st.integers(0, 12), max_size=8)
)  # fmt: skip
def test_killed_job_writes_every_chunk_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[str]], kills: list[int]
) -> None:
    chunks = [[f"{n}.{i}" for i in range(len(size))] for n, size in enumerate(sizes)]
    folder, server = JobFolder(tmp_path_factory.mktemp("job")), Server()
    for steps in kills:
        server.die_in = steps
        try:
            run(folder, server, chunks)
        except Killed:
            continue
    server.die_in = -1
    ran = run(folder, server, chunks)
    assert server.there == [message for chunk in chunks for message in chunk]
    assert (ran.chunks, ran.messages) == (len(chunks), len(server.there))
    again = run(folder, server, chunks)
    assert again.was_done
    assert again.messages == ran.messages


def test_job_with_other_arguments_or_without_its_plan_is_rejected(tmp_path: Path) -> None:
    server = Server()
    run(JobFolder(tmp_path / "a"), server, [["x"]])
    for asked, name, why in (
        ({"topic": "other"}, "job", "a different topic"),
        ({"topic": "jobs"}, "two", "another name"),
    ):
        with pytest.raises(BadRequest, match=why):
            load_or_make_plan(JobFolder(tmp_path / "a"), "load", name, asked, server.sinks, lambda: ([], {}))
    with pytest.raises(BadRequest, match=r"the server already knows a load 'job'.*heapline sink forget txn:load:job:"):
        run(JobFolder(tmp_path / "b"), server, [["x"]])
    assert not (tmp_path / "b" / PLAN).exists()
    assert server.there == ["x"]


def test_server_that_does_not_know_the_job_is_detected(tmp_path: Path) -> None:
    server = Server()
    run(JobFolder(tmp_path), server, [["x"], ["y"]])
    server.commits.clear()
    with pytest.raises(BadRequest, match="does not know the job"):
        run(JobFolder(tmp_path), server, [["x"], ["y"]])
    assert server.there == ["x", "y"]


def test_rate_limits_the_chunks_of_a_run(tmp_path: Path) -> None:
    now, waits = [0.0], []

    def sleep(span: float) -> None:
        waits.append(span)
        now[0] += span

    chunks = [["m"] * 10, ["m"] * 10, ["m"] * 5]
    ran = run(JobFolder(tmp_path), Server(), chunks, rate=2.0, clock=lambda: now[0], sleep=sleep)
    assert waits == [5.0, 5.0]
    assert ran.messages == 25
    with pytest.raises(BadRequest, match="more than 0"):
        run(JobFolder(tmp_path / "other"), Server(), chunks, rate=0)


def _hold(path: Path, ready: Any, done: Any) -> None:
    with JobFolder(path).locked():
        ready.set()
        done.wait(60)


def test_job_folder_is_locked(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, done))
    other.start()
    assert ready.wait(60)
    with pytest.raises(ConflictError, match="another process is using"), JobFolder(tmp_path).locked():
        pass
    done.set()
    other.join(60)
    with JobFolder(tmp_path).locked():
        pass


def test_two_kills_before_progress_is_recorded_lose_no_count(tmp_path: Path) -> None:
    folder, server, chunks = JobFolder(tmp_path), Server(), [["a"], ["b"], ["c"]]
    for steps in (4, 3):  # each time right after a commit, before its progress is recorded
        server.die_in = steps
        with pytest.raises(Killed):
            run(folder, server, chunks)
    server.die_in = -1
    assert run(folder, server, chunks).messages == 3


@pytest.mark.parametrize("name", ["", "a/b", "a:b", ".x", "x" * 101, "ä"])
def test_invalid_job_name_is_rejected(name: str) -> None:
    with pytest.raises(BadRequest, match="is not a job name"):
        check_name(name)
