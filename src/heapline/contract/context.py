"""The context of a call: travels beside the command through every `do`, into the engine and across processes."""

from __future__ import annotations

from msgspec import Struct


class Context(Struct, frozen=True, gc=False):
    principal: str | None = None  # who calls; None: the process that opened the broker
    deadline: float | None = None  # in the running loop's time; crosses the wire as the seconds that are left
    trace: str | None = None  # W3C traceparent
    confirmation: str | None = None  # token of an earlier refusal, for calls that destroy
    forwarded: bool = False  # by a node that has already checked rights and limits and written the audit line
    leases_max: int | None = None  # leases that one holder may have on the topic; set by a server, enforced in the turn


#: The process that opened the broker, without a deadline.
HERE = Context()
