"""Settings for all tests: the Hypothesis profile in force, and which tests share a process. Fixtures are beside the
tests that use them, except the one that tests of several packages share.

"check" is the default: few examples, the same ones on every machine, so that a failure repeats everywhere.
"soak" searches for new ones: `make soak`, or `pytest --hypothesis-profile=soak` on any test.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from heapline import accelerator

#: Read when gRPC is imported. Its handlers run in a forked child too, and crashed one before it became Postgres.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

settings.register_profile(
    "check",
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,  # a busy machine is not a failed test
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak",
    max_examples=20_000,
    stateful_step_count=200,
    derandomize=False,
    deadline=None,
    print_blob=True,  # so that a failure found once can be replayed anywhere
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
)
settings.load_profile("check")

#: Tests that go to one process of a parallel run (`--dist loadgroup`), because starting what they need takes longest.
TOGETHER = (
    "tests/spark/",
    "tests/browser/",
    "tests/integration/test_wheel_install.py",
    "tests/acceptance/test_docs.py",
)


EXIT_SECONDS = 180  # for a process to end after its last test


@pytest.fixture(params=["on", "off"])
def both_accelerators(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test with the functions in C, if they were built, and with their twins."""
    if accelerator.native is None and request.param == "on":
        pytest.skip(f"the accelerator is off ({accelerator.reason})")
    accelerator.use(request.param == "on")
    yield
    accelerator.use(accelerator.native is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End a process that hangs after its last test, and print the stacks of its threads. pytest-timeout covers tests
    only. A worker of a parallel run waits for the others; xdist kills one that does not exit."""
    if not hasattr(session.config, "workerinput"):
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=sys.__stderr__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Group by file: xdist 3.8 sets its groups where pytest 9.2 no longer reads them, so marks alone do nothing."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            found: str = next((start for start in TOGETHER if nodeid.startswith(start)), super()._split_scope(nodeid))
            return found

    return Together(config, log)
