"""`heapline serve` and `heapline worker`: how their processes collect garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from heapline.cli import serve


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_objects_of_the_startup_are_not_scanned_by_later_collections() -> None:
    serve.tune_garbage_collection()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] == serve.GC_THRESHOLD


def test_garbage_that_arises_later_is_collected() -> None:
    serve.tune_garbage_collection()

    class Node:
        pass

    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    del node
    kept = [[] for _ in range(3 * serve.GC_THRESHOLD)]  # a few collections of the youngest objects
    assert gone() is None
    assert len(kept) == 3 * serve.GC_THRESHOLD


def test_server_that_is_ready_tunes_garbage_collection(capsys: pytest.CaptureFixture[str]) -> None:
    settings = SimpleNamespace(tls_certificate=None, host="127.0.0.1", insecure_everybody=True)
    serve._ready(SimpleNamespace(settings=settings, port=1, grpc_port=2, http_port=3, dashboard=None))
    assert "serving: Heapline on port 1" in capsys.readouterr().out
    assert gc.get_freeze_count() > 10_000
