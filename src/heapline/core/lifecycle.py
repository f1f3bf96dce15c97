"""The lifecycle of a message as a table; the diagram in docs/states.md is generated from it.

    python -m heapline.core.lifecycle > docs/states.md

Every possible change of a message's state is listed once: event kind, from, to. The partition's apply methods execute
it. A test walks random histories and checks that no other transition ever happens.
"""

from __future__ import annotations

from typing import NamedTuple

WAITING = ("ready", "delayed")
GONE = ("acked", "cancelled", "expired", "purged", "dropped", "deleted")


class Transition(NamedTuple):
    event: str
    before: str  # "" = the message did not exist
    after: str
    when: str


TRANSITIONS: tuple[Transition, ...] = (
    Transition("enqueued", "", "ready", "enqueue without delay"),
    Transition("enqueued", "", "delayed", "enqueue with delay or deliver_at"),
    Transition("batch_committed", "", "ready", "commit_batch names its part"),
    Transition("batch_committed", "", "delayed", "the same with delay or deliver_at"),
    Transition("fired", "delayed", "ready", "its time has come"),
    Transition("leased", "ready", "leased", "pop"),
    Transition("acked", "leased", "acked", "ack"),
    Transition("nacked", "leased", "delayed", "nack, retries left"),
    Transition("nacked", "leased", "ready", "nack without back-off"),
    Transition("lease_expired", "leased", "delayed", "deadline passed, retries left"),
    Transition("lease_expired", "leased", "ready", "deadline passed, no back-off"),
    Transition("released", "leased", "ready", "release"),
    Transition("dead_lettered", "leased", "dead", "no retries left, or bury"),
    Transition("dead_lettered", "leased", "dropped", "the same on a topic without dlq"),
    Transition("expired", "ready", "expired", "its ttl ended"),
    Transition("expired", "delayed", "expired", "its ttl ended while it waited for a retry"),
    Transition("expired", "leased", "expired", "its ttl had ended when it came back"),
    Transition("cancelled", "ready", "cancelled", "cancel"),
    Transition("cancelled", "delayed", "cancelled", "cancel"),
    Transition("rescheduled", "ready", "ready", "reschedule, priority only"),
    Transition("rescheduled", "ready", "delayed", "reschedule to later"),
    Transition("rescheduled", "delayed", "ready", "reschedule to now"),
    Transition("rescheduled", "delayed", "delayed", "reschedule"),
    Transition("purged", "ready", "purged", "purge"),
    Transition("purged", "delayed", "purged", "purge"),
    Transition("replayed", "dead", "ready", "dlq_replay"),
    Transition("replayed", "dead", "delayed", "dlq_replay with a rate"),
    Transition("dead_deleted", "dead", "deleted", "dlq_delete"),
)

ALLOWED = frozenset((t.event, t.before, t.after) for t in TRANSITIONS)


def mermaid() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for t in TRANSITIONS:
        before = t.before or "[*]"
        after = "[*]" if t.after in GONE else t.after
        label = t.when if t.after not in GONE else f"{t.when} ({t.after})"
        lines.append(f"    {before} --> {after}: {label}")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of docs/states.md."""
    rows = [f"| {t.event} | {t.before or '–'} | {t.after} | {t.when} |" for t in TRANSITIONS]
    return "\n".join(
        (
            "# The states of a message",
            "",
            "Made by `python -m heapline.core.lifecycle` from the table in `core/lifecycle.py`: edit that.",
            "",
            "```mermaid",
            mermaid() + "```",
            "",
            "| event | before | after | when |",
            "|---|---|---|---|",
            *rows,
            "",
        )
    )


if __name__ == "__main__":
    print(page(), end="")
