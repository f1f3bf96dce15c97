"""What a body of the HTTP face may ask; unknown fields are refused. The answers are in json_shapes.py."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from heapline.errors import BadRequest
from heapline.model import DlqFilter, IdempotencyScope, Outgoing
from heapline.ulid import parse_id
from heapline.wire.json_shapes import INT64_MAX, Int64, Moment, Natural, PayloadAs, Text, Token, Topic, Ulid

Seconds = Annotated[float, Meta(ge=0, le=1e12, description="seconds", examples=[30])]
Ids = Annotated[list[Ulid], Meta(max_length=1_000_000)]
Batch = Annotated[str, Meta(min_length=1, max_length=256)]
AS = Meta(description="how payloads are shown; one that is no such thing comes in base64")
ONE_PAYLOAD = "give exactly one of payload (base64), payload_text and payload_json"


class Ask(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of all requests."""


class NewMessage(Ask, kw_only=True):
    """A message to be enqueued. Exactly one of the three payloads is given; everything else has a default."""

    payload: Annotated[bytes | None, Meta(description="any bytes, in base64", examples=["aGVsbG8="])] = None
    payload_text: Annotated[str | None, Meta(description="text, stored as UTF-8", examples=["hello"])] = None
    payload_json: Annotated[
        Raw | UnsetType, Meta(description="any JSON, stored as it is written here", examples=[{"order": 7}])
    ] = UNSET
    priority: Annotated[Int64, Meta(description="the smallest is served first, or the largest on a max heap")] = 0
    key: Annotated[Text | None, Meta(description="messages of one key lie in one partition")] = None
    delay: Annotated[Seconds | None, Meta(description="seconds until it may be delivered")] = None
    deliver_at: Annotated[Moment | None, Meta(description="the same as a moment, with its time zone")] = None
    headers: dict[Text, Annotated[str, Meta(max_length=65536)]] | None = None
    ttl: Annotated[Seconds | None, Meta(description="seconds after falling due at which it expires")] = None
    max_retries: Annotated[Natural | None, Meta(description="deliveries after the first before it is dead")] = None
    idempotency_key: Text | None = None
    idempotency_scope: IdempotencyScope | None = None
    seq: Annotated[Natural | None, Meta(description="its number in its producer's epoch")] = None
    fairness_key: Annotated[Text | None, Meta(description='who takes turns, on heaps with fairness "keys"')] = None

    def content(self) -> bytes:
        given = (self.payload is not None) + (self.payload_text is not None) + (self.payload_json is not UNSET)
        if given != 1:
            raise BadRequest(ONE_PAYLOAD)
        if self.payload is not None:
            return self.payload
        if self.payload_text is not None:
            return self.payload_text.encode()
        content = bytes(self.payload_json)  # type: ignore[arg-type]
        try:
            content.decode()
        except UnicodeDecodeError:
            raise BadRequest("payload_json is not UTF-8") from None
        return content

    def outgoing(self) -> Outgoing:
        return Outgoing(
            self.content(), self.priority, self.key, self.delay, self.deliver_at, self.headers, self.ttl,
            self.max_retries, self.idempotency_key, self.idempotency_scope, self.seq, self.fairness_key,
        )  # fmt: skip

    def is_plain(self) -> bool:
        """Nothing but payload and priority."""
        return (
            self.key is None and self.delay is None and self.deliver_at is None and self.headers is None
            and self.ttl is None and self.max_retries is None and self.idempotency_key is None
            and self.idempotency_scope is None and self.seq is None and self.fairness_key is None
        )  # fmt: skip


class Identified(Ask, kw_only=True):
    """Who numbered the messages, if anybody did: then each has its seq."""

    producer_id: Text | None = None
    epoch: Annotated[Natural | None, Meta(description="of `POST /v1/producers:open`")] = None
    answered_below: Annotated[Natural | None, Meta(description="all numbers below it were answered")] = None


class EnqueueAsk(NewMessage, kw_only=True):
    topic: Topic
    producer_id: Text | None = None  # these three as in Identified: a struct has one base
    epoch: Natural | None = None
    answered_below: Natural | None = None


class EnqueueBatchAsk(Identified, kw_only=True):
    topic: Topic
    messages: Annotated[list[NewMessage], Meta(max_length=1_000_000)]
    atomic: Annotated[bool, Meta(description="all or none; false: each has a result or an error of its own")] = True


class OpenProducerAsk(Ask, kw_only=True):
    topic: Topic
    producer_id: Text


class PrepareAsk(Identified, kw_only=True):
    batch_id: Batch
    part: Batch
    messages: Annotated[dict[Topic, list[NewMessage]], Meta(description="by topic")]


class CommitAsk(Ask, kw_only=True):
    batch_id: Batch
    parts: Annotated[list[Batch], Meta(max_length=100_000)]
    sink: Annotated[Batch | None, Meta(description="with `version`: the row of commits that this is one of")] = None
    version: Annotated[Natural | None, Meta(description="a repeat of it or of a lower one changes nothing")] = None


class AbortAsk(Ask, kw_only=True):
    batch_id: Batch


class PauseAsk(Ask, kw_only=True):
    until: Annotated[Moment | None, Meta(description="a moment with its time zone; without it, for good")] = None


class ThrottleAsk(Ask, kw_only=True):
    partition: Natural
    throttled: bool = True
    reason: Text | None = None


class PopAsk(Ask, kw_only=True):
    topic: Topic
    max_messages: Annotated[int, Meta(ge=1, le=100_000)] = 1
    visibility: Annotated[Seconds | None, Meta(description="seconds of the lease; the heap's default otherwise")] = None
    wait: Annotated[Seconds, Meta(description="seconds to wait for the first message")] = 0.0
    holder: Annotated[Text | None, Meta(description="who works on it, for people")] = None
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 2 << 20
    request_id: Annotated[Text | None, Meta(description="a pop repeated under it gets the same messages")] = None
    payload_as: Annotated[PayloadAs, AS] = "base64"


class Lease(Ask, kw_only=True):
    message_id: Ulid
    lease_token: Token


class LeasesAsk(Ask, kw_only=True):
    """One message (`message_id`, `lease_token`), or many (`leases`)."""

    topic: Topic
    message_id: Ulid | None = None
    lease_token: Token | None = None
    leases: Annotated[list[Lease], Meta(max_length=1_000_000)] | None = None
    tell_lost: Annotated[bool, Meta(description="tell those not held any more in the answer, instead of 409")] = False

    def pairs(self) -> tuple[list[int], list[int]]:
        one = self.message_id is not None and self.lease_token is not None
        if (self.leases is None) != one or (self.message_id is None) != (self.lease_token is None):
            raise BadRequest("give message_id and lease_token, or a list of such pairs in leases")
        if self.leases is None:
            return [parse_id(self.message_id)], [_token(self.lease_token or "")]
        return [parse_id(x.message_id) for x in self.leases], [_token(x.lease_token) for x in self.leases]


class NackAsk(LeasesAsk, kw_only=True):
    backoff: Annotated[Seconds | None, Meta(description="seconds until it comes back; as the heap has it else")] = None
    reason: Text | None = None


class ExtendAsk(LeasesAsk, kw_only=True):
    seconds: Annotated[Seconds, Meta(description="from now")]


class BuryAsk(LeasesAsk, kw_only=True):
    reason: Text | None = None


class MessageAsk(Ask, kw_only=True):
    topic: Topic
    message_id: Ulid


class RescheduleAsk(MessageAsk, kw_only=True):
    delay: Seconds | None = None
    deliver_at: Moment | None = None
    priority: Int64 | None = None


class Where(Ask, kw_only=True):
    """Which dead letters; what is not given matches all."""

    reason: Annotated[Text | None, Meta(description="part of the reason, without regard to case")] = None
    priority_min: Int64 | None = None
    priority_max: Int64 | None = None
    died_after: Moment | None = None
    died_before: Moment | None = None
    key: Text | None = None

    def filter(self) -> DlqFilter:
        return DlqFilter(
            reason=self.reason, priority_min=self.priority_min, priority_max=self.priority_max,
            died_after=self.died_after, died_before=self.died_before, key=self.key,
        )  # fmt: skip


class DeadAsk(Ask, kw_only=True):
    topic: Topic
    message_ids: Ids | None = None
    where: Where | None = None


class ReplayAsk(DeadAsk, kw_only=True):
    rate: Annotated[float | None, Meta(description="messages a second at most")] = None


class LoginAsk(Ask, kw_only=True):
    email: Annotated[str, Meta(max_length=320, examples=["ann@example.org"])]
    password: Annotated[str, Meta(max_length=1024)]


def identity_in(ask: EnqueueAsk | Identified) -> dict[str, Any]:
    return {"producer_id": ask.producer_id, "epoch": ask.epoch, "answered_below": ask.answered_below}


def _token(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= INT64_MAX:
        return int(text)
    raise BadRequest("a lease_token is what a pop gave with the message, unchanged")
