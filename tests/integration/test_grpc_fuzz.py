"""Requests that parse but are nonsense: each gets a code of the table, never INTERNAL, and the server survives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.errors import HeaplineError
from heapline.wire.descriptors import METHODS
from tests.integration.server_rig import Rig

ROUNDS = 40
TEXTS = ["", "jobs", "default/jobs", "a/b/c", "é", "x" * 300, "-1", "9" * 30, "0", "{}", '{"k": 2}', "[]", "null", "\0",
         '{"partition_weights": {"²": 1}}', "01H" + "Z" * 23, '{"partitions": 1e999}']  # fmt: skip
NUMBERS = [0, 1, -1, 2, 255, 1 << 31, (1 << 63) - 1, -(1 << 63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e300, 1e-300]


def nonsense(message: Any, chance: random.Random, depth: int = 0) -> Any:
    """Fill the fields of a message at random."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.3 or (field.name == "wait") or depth > 3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, inner = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            entries, spelled = getattr(message, field.name), value(key, chance)
            if inner.message_type is not None:
                nonsense(entries[spelled], chance, depth + 1)
            else:
                entries[spelled] = value(inner, chance)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(chance.randrange(3)):
                    nonsense(inner.add(), chance, depth + 1)
            else:
                inner.SetInParent()
                nonsense(inner, chance, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend([value(field, chance) for _ in range(chance.randrange(3))])
        else:
            setattr(message, field.name, value(field, chance))
    return message


def value(field: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if field.name == "topic" and chance.random() < 0.8:
        return "jobs"
    if kind == field.CPPTYPE_STRING:
        if field.type == field.TYPE_BYTES:
            return chance.randbytes(chance.choice([0, 1, 4, 8, 16, 64]))
        return chance.choice(TEXTS)
    if kind == field.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return chance.choice(FLOATS)
    low, high = {
        field.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
        field.CPPTYPE_UINT32: (0, 5),  # mostly the lengths of columns: small ones get further
        field.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
        field.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    }[kind]
    return min(high, max(low, chance.choice(NUMBERS)))


@pytest.mark.parametrize("name", [m.name for m in METHODS.values() if not m.streams_in and m.name != "DeleteHeap"])
async def test_nonsense_is_answered_with_a_code_of_the_table(tmp_path: Path, name: str) -> None:
    method = METHODS[name]
    async with Rig(tmp_path) as rig:
        await rig.broker.create_topic("jobs", **rig.small)
        for seed in range(ROUNDS):
            request = nonsense(method.request(), random.Random(f"{name} {seed}"))
            try:
                if method.streams_out:
                    async for _ in rig.wire.calls.stream(name, request):
                        pass
                else:
                    await rig.wire.calls(name, request)
            except HeaplineError as error:
                if type(error) is HeaplineError:  # INTERNAL or UNKNOWN: not one of our errors
                    raise AssertionError(f"seed {seed}: {error!r} for {request}") from None
        assert (await rig.broker.stats("jobs")).topic == "jobs"
