"""`heapline lease list|end|holders`: who holds which messages, and taking them back."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import Meta
from rich.table import Table

from heapline.cli.connection import NetworkGroup, TopicArgument
from heapline.cli.message_view import ago
from heapline.cli.output import Output, bold, columns_table, count, counted, harmless
from heapline.contract.broker import Broker
from heapline.contract.inspection import HeldLease, WorkerInfo
from heapline.wire.json_forms import to_json

IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Message ids, as lease list prints them.")]

app = NetworkGroup("lease", example="lease list jobs", more="A lease is the time for which a worker has a message.")


@app.call("list", example="jobs --holder worker-7", json="one object per lease: message_id, holder, since, deadline, …")
async def list_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    holder: Annotated[str | None, "Only leases of this holder."] = None,
    limit: Annotated[int, "-n", "Maximum number of leases.", Meta(ge=1)] = 100,
) -> None:
    """List the leases of a topic, the oldest first."""
    found = await hl.list_leases(topic, limit, holder=holder)
    out.rows(found, _leases, empty=f"nothing is leased in {bold(topic)}", json=to_json, limit=limit)


def _leases(found: list[HeldLease]) -> Table:
    rows = [
        (row.message_id, harmless(row.holder or ""), ago(row.since), ago(row.deadline), str(row.attempts))
        for row in found
    ]
    return columns_table("", ("message_id", "holder", "since", "ends", "delivery"), rows, right=(4,))


@app.call("end", example="jobs 01JGXV0Z000000G7M9QK2V4T8B --reason 'worker hangs'", json='{"count": NUMBER}.')
async def end_command(
    hl: Broker,
    out: Output,
    topic: TopicArgument,
    ids: IdsArgument,
    reason: Annotated[str | None, "Recorded with the messages and in the audit log."] = None,
) -> None:
    """Remove messages from their holders; they are redelivered after the topic's backoff, which counts as a delivery.

    A holder that works on such a message cannot acknowledge it any more.
    """
    ended = await hl.end_leases(topic, list(ids), reason=reason)
    out.row({"count": ended}, f"{counted(ended, 'lease')} of {bold(topic)} ended")


@app.call("holders", example="", json="one object per topic and holder: leases, waiting, rate and last_lease_at.")
async def holders_command(hl: Broker, out: Output) -> None:
    """List who takes messages from which topic, now or in the last hour."""
    out.rows(await hl.list_workers(), _workers, empty="no message was leased in the last hour", json=to_json)


def _workers(found: list[WorkerInfo]) -> Table:
    rows = [
        (
            harmless(worker.topic),
            harmless(worker.holder),
            count(worker.leases),
            count(worker.waiting),
            f"{worker.rate:.3g}/s",
            ago(worker.last_lease_at),
        )
        for worker in found
    ]
    return columns_table("", ("topic", "holder", "leases", "waiting", "rate", "last lease"), rows, right=(2, 3, 4))
