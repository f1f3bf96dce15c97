"""The promises hold for clients on native connections that are split, late and cut; and a wrong answer is detected."""

from __future__ import annotations

import pytest

from heapline.wire.frames import ServerFrames
from tests.simulation.simulate import simulate


@pytest.mark.parametrize(("seed", "groups"), [(1, False), (2, False), (3, True)])
def test_promises_hold_over_native_connections_that_are_cut(seed: int, groups: bool) -> None:
    report = simulate(seed, groups=groups, wire=True)
    assert report.complaints == [], report.text()
    assert report.history.drained | report.history.damaged == set(report.history.topics)
    seen = report.wire
    assert min(seen[kind] for kind in ("cuts", "cancels", "waits", "Error", "Item")) > 0
    assert seen["pieces"] > 2 * seen["Request"], "frames arrive in several pieces"


def test_the_same_seed_is_the_same_run_over_native_connections() -> None:
    first, second = simulate(7, 100, wire=True), simulate(7, 100, wire=True)
    assert first.history.lines() == second.history.lines()
    assert first.wire == second.wire
    assert first.text().endswith("--seed 7 --steps 100 --wire")


def test_simulator_detects_an_answer_to_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    send, before = ServerFrames.send_response, [b""]

    def stale(self: ServerFrames, request: int, body: bytes = b"", *, compress: bool = False) -> None:
        before.append(body)
        send(self, request, before[-2] if request % 20 == 0 else body, compress=compress)

    monkeypatch.setattr(ServerFrames, "send_response", stale)
    assert any(simulate(seed, 100, rot=False, wire=True).complaints for seed in range(1, 4))
