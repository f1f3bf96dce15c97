"""The SDK's benchmark: its rows, its peers, and a tiny run of each load against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.drivers import sdk
from benchmarks.drivers.window import Job, Outcome
from benchmarks.peers import TASK_PEERS
from benchmarks.rows import Row
from benchmarks.sdk import batches, importing, singles, targets, tasks, trickle
from benchmarks.server import driving, lifecycle
from benchmarks.server.spawned import Serving, heapline_server
from benchmarks.server.targets import LOADS


def outcome(messages: int) -> Outcome:
    return Outcome(messages=messages, seconds=1.0, client_cpu_s=0.5, server_cpu_s=0.25)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_peer_of_tasks_has_a_target_and_every_target_a_peer() -> None:
    assert TASK_PEERS.keys() == targets.PEERS.keys()
    assert command.parse(["sdk"]).peers == tuple(targets.PEERS)
    assert command.parse(["core"]).peers == ()
    with pytest.raises(SystemExit):
        command.parse(["sdk", "--peers", "redis"])


def test_ratio_of_batches_is_the_median_over_alternating_rounds() -> None:
    """Not the ratio of median rates: the machine was fast in one round and slow in the others."""
    sdk, wire = [outcome(n) for n in (90, 900, 95)], [outcome(n) for n in (100, 1000, 50)]
    rate, server, client = (Row.from_yielded(row) for row in batches.figures("enqueue", sdk, wire))
    assert (rate.ratio, rate.target, rate.met) == (0.9, "≥ 0.9×", True)
    assert (server.better, client.better) == ("lower", "lower")


def test_singles_are_shown_next_to_the_embedded_broker() -> None:
    rate, server, client = (Row.from_yielded(row) for row in singles.figures(outcome(12_000), outcome(24_000)))
    assert (rate.ratio, rate.target, rate.met) == (0.5, "≥ 35,000 messages/s", False)
    assert (server.target, server.met, client.target, client.met) == ("≤ 14 µs", False, "≤ 12 µs", False)


def test_trickle_is_shown_as_shares_of_a_core() -> None:
    server, worker = (Row.from_yielded(row) for row in trickle.figures([10.1, 4.9], [0.5, 0.2]))
    assert (server.target, server.met, server.baseline) == ("≤ 10% of a core", False, 0.5)
    assert (worker.target, worker.met, worker.better) == ("≤ 5% of a core", True, "lower")


def test_lazy_batches_are_measured_if_the_method_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pop(self: object, topic: str, *, lazy: bool = False) -> None: ...

    monkeypatch.setattr("heapline.contract.broker.Broker.pop", pop)
    assert sdk.has_lazy_batches()
    assert ("lazy", 1000, 4) in LOADS


def test_tasks_next_to_a_peer_show_its_durability() -> None:
    about = {"peer": "celery", "version": "1", "durability": "some"}
    rate, cpu = (Row.from_yielded(r) for r in tasks.next_to("celery", about, outcome(10), outcome(100)))
    assert (rate.ratio, rate.target, rate.met, rate.about) == (10.0, "≥ 10×", True, about)
    assert cpu.ratio == pytest.approx(0.1)
    gone = Row.from_yielded(tasks.missing("celery", about, "no wheel"))
    assert (gone.error, gone.value, gone.target) == ("no wheel", None, "≥ 10×")


def test_startup_is_shown_next_to_imports_of_numpy_and_msgspec() -> None:
    ms = {name: 310.0 for program, baseline, _ in importing.PROGRAMS.values() for name in (program, baseline)}
    ms |= {importing.NUMPY: 100.0, importing.NUMPY_AND_MSGSPEC: 155.0, "serve": 901.0, "worker": 499.0}
    imported, _, opened, _, serve, worker = (Row.from_yielded(row) for row in importing.figures(ms))
    assert (imported.ratio, imported.target, imported.met) == (3.1, "≤ 3×", False)
    assert (opened.ratio, opened.target, opened.met, opened.better) == (2.0, "≤ 1.5×", False, "lower")
    assert (serve.target, serve.met, worker.target, worker.met) == ("≤ 900 ms", False, "≤ 500 ms", True)


def test_startup_is_measured_in_a_new_process() -> None:
    assert 0 < importing.program_cpu_s("import sys; assert 'heapline' not in sys.modules; import heapline") < 60


# -- the whole path ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with heapline_server(tmp_path_factory.mktemp("sdk") / "data") as serving:
        yield serving


@pytest.mark.parametrize("kind", batches.KINDS)
def test_batches_run_against_a_real_server(server: Serving, kind: str) -> None:
    seen = driving.drive("sdk", lifecycle.job_of(server, kind, (20, 2), 30.0, messages_max=200))
    assert 200 <= seen.messages < 200 + 2 * 20


def test_singles_run_against_a_real_server_and_without_one(server: Serving, tmp_path: Path) -> None:
    connected = driving.drive("singles", lifecycle.job_of(server, "single", (1, 8), 30.0, messages_max=50))
    job = Job(**{**vars(singles.embedded_job(server, tmp_path / "embedded", 30.0)), "in_flight": 8, "messages_max": 50})
    for seen in (connected, driving.drive("singles", job)):
        assert 50 <= seen.messages < 50 + 8


def test_tasks_run_against_a_real_server(server: Serving) -> None:
    seen = driving.drive("tasks", tasks.ours_job(server, 30.0, messages_max=500))
    assert 500 <= seen.messages < 500 + 4 * 100
