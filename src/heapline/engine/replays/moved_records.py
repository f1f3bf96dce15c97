"""Find rows whose record was moved: a live message's record may be rewritten to another segment after it fired.

The stream contains a record's position at the time when its row was written. If that position is deleted, the partition
that still has the message knows the current one. A record that is not found this way is deleted and stays `bad`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from heapline.contract.stream import Payloads
from heapline.core.events import I64
from heapline.engine.delivery import split_small
from heapline.engine.groups.pages import Page
from heapline.engine.replays.scan import Stretch
from heapline.engine.runner import TopicRunner


async def mend(runner: TopicRunner, stretch: Stretch) -> Stretch:
    """Return the same stretch, with the records that were found."""
    bad = {p: page for p, page in stretch.pages.items() if page.bad}
    if not bad:
        return stretch
    pages, records = dict(stretch.pages), dict(stretch.records)
    for p, page in bad.items():
        at = np.array(sorted(page.bad), dtype=np.int64)
        ids = page.rows.ids[at]
        order = ids.argsort()
        found = await runner.call(lambda now, p=p, ids=ids[order]: runner.loaded.topic.partitions[p].positions_of(ids))  # type: ignore[misc]
        there = found >= 0
        if there.any():
            rows = at[order][there]
            pages[p], records[p] = _mended(page, records[p], rows, await runner.load(found[there]))
    return stretch._replace(pages=pages, records=records)


def _mended(page: Page, rows: Any, at: I64, loaded: Any) -> tuple[Page, Any]:
    rows = rows.copy()
    keys, headers, fairness = (_filled(c, len(page)) for c in (page.keys, page.headers, page.fairness_keys))
    starts, ends, priorities = page.payloads.starts.copy(), page.payloads.ends.copy(), page.priorities.copy()
    enqueued, bad, pieces = page.enqueued_ms.copy(), dict(page.bad), [bytes(page.payloads.data)]
    end = len(pieces[0])
    for i, row in enumerate(at.tolist()):
        record = loaded.rows[i]
        if i in loaded.bad or int(record["id"]) != int(page.rows.ids[row]):
            continue
        rows[row] = record
        priorities[row] = priorities[row] or record["priority"]  # a reschedule stores its own priority beside its row
        enqueued[row] = record["enqueued_at"]
        small = loaded.smalls[i], int(record["key_len"]), int(record["fairness_len"]), int(record["flags"])
        keys[row], fairness[row], headers[row] = split_small(*small)
        starts[row], end = end, end + len(loaded.payloads[i])
        ends[row] = end
        pieces.append(loaded.payloads[i])
        del bad[row]
    payloads = Payloads(memoryview(b"".join(pieces)), starts, ends)
    mended = Page(
        page.partition, page.start, page.end, page.rows, priorities, enqueued, payloads, _used(keys), _used(headers),
        _used(fairness), bad, page.first, page.place,
    )  # fmt: skip
    return mended, rows


def _filled(column: list[Any] | None, count: int) -> list[Any]:
    return [None] * count if column is None else list(column)


def _used(column: list[Any]) -> list[Any] | None:
    return column if any(value is not None for value in column) else None
