"""The audit proves real histories, and refutes exactly the broken promise for every kind of fault."""

from __future__ import annotations

import asyncio
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heapline.spark.audit.facts import Balance, BatchBook
from heapline.spark.audit.ranks import BEGIN, END, NEVER, Exclusion, Intervals, exclude, ranks
from heapline.spark.audit.report import NOT_APPLICABLE, PROVED
from heapline.spark.audit.steps import Mark, Reach
from tests.unit.engine.rig import opened
from tests.unit.spark.local_audit import audit_table
from tests.unit.spark.planted_faults import PLANTS, Rows, numbered
from tests.unit.spark.random_histories import BACKOFF, TOPICS, config, events, live, standing

Life = tuple[pa.Table, dict[str, Any], dict[str, dict[int, Balance]]]


async def lived(name: str, seed: int, steps: int) -> Life:
    async with opened(topic={**BACKOFF, **TOPICS[name]}) as rig:
        await live(rig, Random(seed), steps)
        return await events(rig), {"jobs": await config(rig)}, {"jobs": await standing(rig)}


@cache
def a_life(name: str, seed: int) -> Life:
    return asyncio.run(lived(name, seed, 90))


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(sorted(TOPICS)), seed=st.integers(0, 1 << 32))
def test_real_history_is_proved(name: str, seed: int) -> None:
    table, configs, closing = asyncio.run(lived(name, seed, 60))
    found = audit_table(table, configs, closing=closing)
    assert found.refuted == (), [check for check in found.checks if check.wrong]
    assert found.events == table.num_rows
    held = list(closing["jobs"].values())
    assert found.standing["leased"] == sum(s.leased for s in held)
    assert found.standing["waiting"] + found.standing["delayed"] == sum(s.waits for s in held)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_fault_refutes_exactly_its_promise(plant: Any, seed: int) -> None:
    for name, number in ((name, 10 * seed + n) for n in range(3) for name in ("parted", "plain", "largest first")):
        table, configs, closing = a_life(name, number)
        best = -100 if configs["jobs"].mode == "min" else 100
        planted = plant([{**row, "best": best} for row in table.to_pylist()])
        if planted is not None:
            found = audit_table(
                as_table(numbered(planted), table), configs, closing=cut(closing, numbered(planted), plant)
            )
            assert found.refuted == (PLANTS[plant],)
            check = found.check(PLANTS[plant])
            assert check.wrong >= 1
            assert check.examples[0].topic == "jobs"
            assert check.examples[0].offset is not None
            return
    pytest.fail("no history was suitable for this fault")


def as_table(rows: Rows, like: pa.Table) -> pa.Table:
    return pa.Table.from_pylist([{name: row[name] for name in like.column_names} for row in rows], schema=like.schema)


def cut(closing: dict[str, dict[int, Balance]], rows: Rows, plant: Any) -> dict[str, dict[int, Balance]]:
    """The broker's own counts at the current end of the log; none if the fault changes them."""
    if plant.__name__ in ("torn_batch", "ack_of_a_waiting_message", "seen_though_aborted", "message_from_nowhere"):
        return {}
    ends = {p: 1 + max(r["offset"] for r in rows if r["partition"] == p) for p in {r["partition"] for r in rows}}
    return {"jobs": {p: s._replace(offset=ends.get(p, 0)) for p, s in closing["jobs"].items()}}


def test_missing_row_of_the_log_refutes_none_lost() -> None:
    table, configs, _ = a_life("plain", 0)
    rows = [row for row in table.to_pylist() if row["kind"] != "extended"]
    at = next(n for n, row in enumerate(rows) if row["kind"] == "fired")
    found = audit_table(table.take([n for n in range(table.num_rows) if n != at + 1]), configs)
    assert "none_lost" in found.refuted
    assert "rows of the log are missing" in found.check("none_lost").examples[0].why


@pytest.mark.parametrize("name", ["parted", "aging"])
def test_audit_judges_a_log_without_its_beginning(name: str) -> None:
    table, configs, closing = a_life(name, 1)
    half = table.filter(np.array(table["unit"]) > np.median(np.array(table["unit"])))
    found = audit_table(half, configs, closing=closing)
    assert found.refuted == ()
    assert found.from_before > 0
    assert "are older than the events" in found.check("none_lost").why


def test_rank_is_not_judged_without_a_bound() -> None:
    table, configs, _ = a_life("plain", 0)
    changed = {"jobs": msgspec.structs.replace(configs["jobs"], strategy="round_robin")}
    plain = table.filter(np.array(table["kind"]) != "config_changed")
    check = audit_table(plain, changed).check("rank")
    assert (check.verdict, "in turn" in check.why) == (NOT_APPLICABLE, True)
    assert audit_table(plain, {}).check("rank").verdict == NOT_APPLICABLE
    few = plain.filter(np.isin(np.array(plain["kind"]), ["enqueued"]))
    assert {
        c.verdict for c in audit_table(few, configs).checks if c.name in ("batches", "one_holder", "not_early")
    } == {NOT_APPLICABLE}


# -- ranks -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60), st.booleans())
def test_rank_counts_better_ready_messages_at_the_selection(random: Random, count: int, older: bool) -> None:
    seqs = sorted(random.sample(range(1, 500, 2), count))  # of selections; what becomes ready has even ones
    rows = []
    for id in range(count):
        start = random.randrange(0, 500, 2)
        judged = random.random() < 0.7
        end = random.choice([s for s in seqs if s > start] or [None]) if judged else random.choice([None, start + 40])
        judged = judged and end is not None
        from_step = END if random.random() < 0.2 else start
        to_step = end if judged else BEGIN
        to_unit = NEVER if end is None else end // 20
        rows.append((random.randint(0, 4), id, start // 20, from_step, to_unit, to_step or BEGIN, int(judged), id))
    intervals = Intervals(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))
    which, found = ranks(intervals, older)
    assert dict(zip(which.tolist(), found.tolist(), strict=True)) == {
        n: 1 + sum(better(rows[n], other, older) for other in rows) for n, row in enumerate(rows) if row[6]
    }


def better(asked: tuple[int, ...], other: tuple[int, ...], older: bool) -> bool:
    key, id, from_unit, from_step, to_unit, to_step, _, _ = other
    at = (asked[4], asked[5])
    there = (from_unit, from_step) < at < (to_unit, to_step)
    return there and (key < asked[0] or (older and key == asked[0] and id < asked[1]))


def test_throttled_partition_does_not_count_in_ranks() -> None:
    one = Intervals(*(np.array([n]) for n in (0, 7, 3, 5, 9, 40, 1, 1)))
    found = exclude(one, np.array([2]), [Exclusion(2, 4, 6)])
    spans = sorted(
        zip(*(getattr(found, n).tolist() for n in ("from_unit", "from_step", "to_unit", "judged")), strict=True)
    )
    assert spans == [(3, 5, 4, 0), (6, END, 9, 1)]
    assert exclude(one, np.array([1]), [Exclusion(2, 4, 6)]) == one


# -- batches -----------------------------------------------------------------------------------------------------------


def mark(topic: str, kind: str, offset: int, said: str, rows: int = 1, named: int = 0, count: int = 0) -> Mark:
    return Mark(topic, 0, f"batch_{kind}", "b", said, offset, offset, rows, named, count)


def prepared(topic: str, part: str, offset: int, count: int = 3, identified: int = 0) -> Mark:
    said = f'{{"part": "{part}", "identified": {identified}, "first_id": 1, "last_id": 3}}'
    return mark(topic, "prepared", offset, said, count=count)


def committed(topic: str, offset: int, came: int, *parts: str) -> Mark:
    said = f'{{"parts": {list(parts)}, "more": false}}'.replace("'", '"')
    return mark(topic, "committed", offset, said, came, came)


@pytest.mark.parametrize(
    ("marks", "torn"),
    [
        ([prepared("a", "p", 0), committed("a", 1, 3, "p")], 0),
        ([prepared("a", "p", 0), committed("a", 1, 2, "p")], 1),
        ([prepared("a", "p", 0), prepared("a", "q", 1), committed("a", 2, 3, "p")], 0),
        ([prepared("a", "p", 0, identified=3), prepared("a", "q", 1, identified=1), committed("a", 2, 4, "p", "q")], 0),
        ([prepared("a", "p", 0, identified=3), committed("a", 2, 2, "p")], 1),
        ([prepared("a", "p", 0), committed("a", 1, 4, "p")], 1),
        ([prepared("a", "p", 0), mark("a", "aborted", 1, "{}")], 0),
        ([prepared("a", "p", 0), committed("a", 1, 3, "p"), prepared("z", "p", 0), mark("z", "aborted", 1, "{}")], 1),
        ([prepared("a", "p", 0), committed("a", 1, 3, "p"), prepared("z", "p", 0)], 0),
        ([prepared("a", "p", 0), committed("a", 1, 3, "p"), prepared("z", "p", 0), committed("z", 1, 1, "q")], 2),
        ([committed("a", 1, 3, "p")], 1),
    ],
)  # fmt: skip
def test_batch_is_atomic_across_topics(marks: list[Mark], torn: int) -> None:
    reaches = [Reach(topic, 0, 9, 0, 8, 8, NEVER, 0) for topic in ("a", "z")]
    assert len(list(BatchBook(marks, reaches).torn())) == torn


def test_audit_reports_the_number_of_cases() -> None:
    table, configs, closing = a_life("parted", 0)
    found = audit_table(table, configs, closing=closing)
    assert found.check("one_holder").looked_at == np.count_nonzero(np.array(table["kind"]) == "leased")
    assert found.check("none_lost").verdict == PROVED
    assert found.as_json()["refuted"] == []
