"""A manager's log goes to the logger that its user passes, in the form that this logger takes."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from heapline.assign.errors import BadConfig
from heapline.assign.logger import METHODS, log_to
from tests.unit.assign.pool_rig import Pool, in_virtual_time
from tests.unit.assign.test_manager import QUICK

Calls = list[tuple[str, str, dict[str, Any]]]


class Structured:
    """Takes facts as keywords, as structlog does."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def __getattr__(self, level: str) -> Any:
        if level not in METHODS:
            raise AttributeError(level)
        return lambda message, **facts: self.calls.append((level, message, facts))


class Paired(Structured):
    """Takes keys and values alternately, as zap does."""

    def __getattr__(self, level: str) -> Any:
        if level not in METHODS:
            raise AttributeError(level)
        return lambda message, *pairs: self.calls.append((level, message, dict(zip(pairs[::2], pairs[1::2]))))  # noqa: B905


@pytest.mark.parametrize("kind", [Structured, Paired])
def test_manager_logs_to_the_given_logger_only(kind: type[Structured], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "heapline.assign")
    logger, pool = kind(), Pool(partitions=3, config=QUICK)

    async def failing(*_: object) -> None:
        if len(pool.errors) < 1:
            raise OSError("no room")

    @in_virtual_time
    async def scenario() -> None:
        manager = pool.manager(logger=logger, hook=failing)
        await manager.start()
        await manager.stop()

    scenario()
    assert ("info", "assign.claimed", {"worker": "worker-0"}) in logger.calls
    assert ("info", "assign.leads", {"worker": "worker-0"}) in logger.calls
    assert ("warn", "assign.error", {"error": "OSError", "detail": "no room"}) in logger.calls
    assert ("info", "assign.state", {"before": "INIT", "after": "CLAIMING_ID"}) in logger.calls
    assert not caplog.records


def test_logger_of_the_standard_library_receives_events_with_facts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "my.pool")
    log_to(logging.getLogger("my.pool")).info("assign.claimed", worker="worker-7")
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("my.pool", "assign.claimed worker='worker-7'")]


def test_logger_that_raises_affects_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Structured):
        def __getattr__(self, level: str) -> Any:
            if level not in METHODS:
                raise AttributeError(level)
            return self._fail

        def _fail(self, message: str, **facts: Any) -> None:
            raise OSError("the disk is full")

    pool = Pool(partitions=3, config=QUICK)

    @in_virtual_time
    async def scenario() -> None:
        manager = pool.manager(logger=Broken())
        await manager.start()
        await manager.stop()

    scenario()
    assert any("assign.logger_failed" in record.getMessage() for record in caplog.records)


def test_object_without_the_methods_of_a_logger_is_rejected() -> None:
    class Half:
        def info(self, message: str, **facts: Any) -> None: ...

    half: Any = Half()
    with pytest.raises(BadConfig, match="debug, warn, error, fatal"):
        Pool().manager(logger=half)
