"""Valid, damaged and hostile calls of the accelerated functions, each derived from a seed; both versions must agree.

    python -m tests.unit.accelerator_calls EXTENSION ROUNDS

tries the functions of one extension, for example one that was compiled with a sanitizer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from random import Random
from typing import Any, NamedTuple

import numpy as np

from heapline.accelerator import twins
from heapline.core import leases as _leases
from heapline.core.record import ROW
from heapline.journal import block as _block
from heapline.journal import records as _records
from heapline.journal import sectors as _sectors

assert {_block, _leases, _records, _sectors}  # importing them registers the twins

LENGTHS = (0, 1, 2, 15, 16, 17, 80, 255, 256, 511, 512, 513, 4000)
NUMBERS = (-(1 << 63), -(1 << 31), -80, -1, 0, 1, 16, 79, 80, 81, 1 << 20, (1 << 31) - 1, 1 << 32, (1 << 63) - 1)
ALIENS: tuple[Any, ...] = (None, 7, "text", 1.5, bytearray(80), memoryview(b"x" * 80), [b"x"], (b"x",), {}, object())
#: Errors by which a function may refuse its arguments.
REFUSALS = (TypeError, ValueError, BufferError, OverflowError, KeyError)


class Call(NamedTuple):
    name: str
    args: tuple[Any, ...]
    is_comparable: bool = True  # the twin promises nothing about arguments of other types than those that it declares


def make_call(seed: int) -> Call:
    random = Random(seed)
    make: Callable[[Random], Call] = random.choice([_lay_out, _cut_records, _sector_table, _lease_map, _alien])
    return make(random)


def _rows(random: Random, count: int) -> Any:
    return np.frombuffer(bytearray(random.randbytes(ROW.itemsize * count)), ROW)


def _parts(random: Random, count: int) -> list[Any]:
    return [random.randbytes(random.choice(LENGTHS)) for _ in range(count)]


def _lay_out(random: Random) -> Call:
    count = random.choice((0, 1, 2, 3, 9, 40))
    rows, payloads = _rows(random, count), _parts(random, count)
    smalls = _parts(random, count) if random.random() < 0.5 else None
    damaged = random.choice([payloads, payloads if smalls is None else smalls])
    match random.randrange(9):
        case 0:
            damaged.append(b"one too many")
        case 1 if damaged:
            damaged.pop()
        case 2 if damaged:
            alien = random.choice(ALIENS)
            damaged[random.randrange(count)] = alien
            return Call("lay_out", (rows, smalls, payloads), type(alien) not in (bytearray, memoryview))
        case 3:
            rows = np.concatenate([rows, rows])[::2]
        case 4:
            rows.flags.writeable = False
        case 5:
            return Call("lay_out", (rows, smalls, tuple(payloads)))
    return Call("lay_out", (rows, smalls, payloads))


def _cut_records(random: Random) -> Call:
    blocks: list[Any] = []
    places = []
    for index in range(random.choice((1, 1, 2, 5))):
        count = random.choice((0, 1, 2, 20))
        data, _, _ = twins["lay_out"](_rows(random, count), _parts(random, count), _parts(random, count))
        blocks.append(data)
        places += [(index, row * ROW.itemsize) for row in range(count)]
    random.shuffle(places)
    which = np.array([index for index, _ in places], np.int64)
    offsets = np.array([offset for _, offset in places], np.int64)
    is_comparable = True
    match random.randrange(10):
        case 0 | 1 | 2:  # random bytes become lengths and distances
            at = random.randrange(len(blocks))
            data = bytearray(blocks[at])
            for _ in range(random.choice((1, 1, 8))):
                if data:
                    data[random.randrange(min(len(data), 200))] = random.choice((0, 1, 255, random.randrange(256)))
            blocks[at] = bytes(data)
        case 3 if len(which):
            which[random.randrange(len(which))] = random.choice(NUMBERS)
        case 4 if len(which):
            offsets[random.randrange(len(which))] = random.choice(NUMBERS)
        case 5:
            offsets = np.append(offsets, 0)
        case 6:
            at = random.randrange(len(blocks))
            blocks[at] = blocks[at][: random.randrange(len(blocks[at]) + 1)]
        case 7:
            blocks[random.randrange(len(blocks))] = random.choice(ALIENS)
            is_comparable = False  # a block that contains no record
        case 8:
            which = which.astype(random.choice([np.int32, np.int8, np.float64]))
            is_comparable = False
    return Call("cut_records", (blocks, which, offsets), is_comparable)


def _sector_table(random: Random) -> Call:
    sectors = random.choice((0, 1, 2, 3, 70, 200))
    data = random.randbytes(512 * sectors)
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 2, 9))))
    kinds = (bytes, bytearray, memoryview)
    edges = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
    parts: list[Any] = [random.choice(kinds)(data[start:end]) for start, end in edges]
    number: Any = sectors
    match random.randrange(8):
        case 0:
            number = random.choice((*NUMBERS, sectors + 1, sectors - 1, 1 << 63, -(1 << 70)))
        case 1:
            parts.append(random.choice((b"x", b"y" * 512, bytearray(513))))
        case 2:
            parts[random.randrange(len(parts))] = random.choice((None, 7, "text", {}))
        case 3:
            parts[0] = memoryview(bytes(parts[0]) * 2)[::2] if len(parts[0]) > 1 else parts[0]
            return Call("sector_table", (parts, number), is_comparable=False)
        case 4:
            parts += [b""] * random.choice((1, 5000))
    return Call("sector_table", (parts, number))


def _lease_map(random: Random) -> Call:
    """Steps of one map: (method, arguments). Few ids, so that leases are replaced, ended and granted again."""
    ids = [*range(random.choice((5, 60, 400))), -1, -(1 << 63), (1 << 63) - 1]
    steps: list[tuple[str, tuple[Any, ...]]] = []
    tokens = dict.fromkeys(ids, -1)  # of the last grant of each id
    has_aliens = random.random() < 0.2
    for step in range(random.choice((3, 20, 60))):
        some = [random.choice(ids) for _ in range(random.choice((0, 1, 1, 3, 50)))]
        numbers = [random.choice(NUMBERS) for _ in some]
        token = 1000 * step
        match random.randrange(7):
            case 0 | 1 | 2:
                end = (random.choice(NUMBERS), step, random.choice([None, "a", "b", "ä" * 300]))
                steps.append(("grant", (some, token, numbers, list(reversed(numbers)), *end)))
                tokens |= zip(some, range(token, token + len(some)), strict=True)
            case 3:
                claimed = [tokens[id] + (random.random() < 0.1) for id in some]
                steps.append(("held", (some, claimed)))
            case 4:
                steps.append(("end", (random.choice([some, list(set(some))]),)))
            case 5:
                steps.append(("first_current", (some, random.choice((0, 0, 1, 7, -1)), random.choice(NUMBERS))))
            case 6:
                id = random.choice([*ids, np.int64(1), True, 1 << 63, -(1 << 70)])
                steps.append((random.choice(["get", "__getitem__", "__contains__"]), (id,)))
        if has_aliens or random.random() < 0.1:
            name, args = steps[-1]
            at = random.randrange(len(args))
            if has_aliens:
                steps[-1] = (name, (*args[:at], random.choice((*ALIENS, 1 << 63, ["x"], [1 << 70])), *args[at + 1 :]))
            elif type(args[at]) is list and name != "end" and len(args) > 1:
                steps[-1] = (name, (*args[:at], [*args[at], 1], *args[at + 1 :])) if at else steps[-1]
    return Call("LeaseMap", (steps,), not has_aliens)


def play(leases: Any, steps: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Return the outcome of each step, and what the map contains afterwards."""
    found: list[Any] = []
    for name, args in steps:
        try:
            result = getattr(leases, name)(*args)
        except REFUSALS as error:
            result = "unknown" if type(error) is KeyError else "refused"
        if name == "end" and type(result) is tuple:
            runs: Counter[str | None] = Counter()
            for holder, count in result[1]:
                runs[holder] += count
            result = result[0], runs
        found.append((result, len(leases)))
    return [*found, list(zip(leases, leases.values(), strict=True))]


def _alien(random: Random) -> Call:
    name = random.choice(sorted(twins.keys() - {"LeaseMap"}))
    args = tuple(random.choice(ALIENS) for _ in range(random.choice((0, 1, 2, 3, 3, 4))))
    return Call(name, args, is_comparable=False)


def outcome(function: Any, call: Call) -> Any:
    """Return the result and the rows that the call completed; "refused" if it was refused and changed nothing."""
    rows = call.args[0] if call.args and isinstance(call.args[0], np.ndarray) else None
    before = rows.tobytes() if rows is not None else b""
    counts = references(call)
    try:
        result = play(function(), *call.args) if call.name == "LeaseMap" else function(*call.args)
    except REFUSALS:
        assert rows is None or rows.tobytes() == before, "a refused call has changed its rows"
        result = "refused"
    after = rows.tobytes() if rows is not None else b""
    answer = (result, after)
    assert references(call) == counts, "references were leaked"
    for part in call.args[0] if call.name == "sector_table" and call.args and type(call.args[0]) is list else ():
        if type(part) is bytearray:
            part.append(0)  # raises BufferError if the call still holds the buffer
    return answer


def references(call: Call) -> list[int]:
    """Return the reference counts of the arguments and of what lists of them contain."""
    found = [*call.args, *(item for argument in call.args if type(argument) is list for item in argument)]
    # Shared objects have other references: small numbers, short bytes, and the alien objects.
    own = (x for x in found if type(x) in (list, np.ndarray, bytearray) or (type(x) is bytes and len(x) > 1))
    return [sys.getrefcount(x) for x in own]


def check(native: Any, seed: int) -> None:
    """Raise AssertionError if the two versions disagree about a call."""
    call = make_call(seed)
    found = outcome(getattr(native, call.name), call)
    if call.is_comparable:
        assert found == outcome(twins[call.name], make_call(seed)), f"seed {seed}: {call.name}"


def load(path: str) -> Any:
    spec = spec_from_file_location("_accelerator", path, loader=ExtensionFileLoader("_accelerator", path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    extension = load(sys.argv[1])
    for seed in range(int(sys.argv[2])):
        check(extension, seed)
    print(f"{sys.argv[2]} calls")
