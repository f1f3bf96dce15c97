"""Prepared batches: parts that are durable and invisible until a commit names them; and sinks, which count commits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from heapline.contract.call import Access, Command, Count, Page, Repeat, Right, call_family
from heapline.contract.config import canonical_topic
from heapline.contract.errors import BadRequest
from heapline.contract.fields import Cursor, Limit, Natural, ProducerName, ShortName, Topic
from heapline.contract.message import BatchInfo, SinkInfo
from heapline.contract.messages import AnsweredBelow, EnqueuedBatch, Epoch, NewMessages, check_identity


class Share(Struct, frozen=True, forbid_unknown_fields=True):
    """The messages of one topic in a part of a batch."""

    topic: Topic
    messages: NewMessages


class PreparedShare(Struct, frozen=True, omit_defaults=True):
    topic: str
    results: EnqueuedBatch


class Prepared(Struct, frozen=True, omit_defaults=True):
    shares: list[PreparedShare] = []  # empty with `without_results`


PRODUCE_ANYWHERE = (Access(Right.PRODUCE, ""),)
ADMIN_EVERYWHERE = (Access(Right.ADMIN, ""),)

batch_call = call_family(feature="batches", route="batch")


@batch_call(
    id=0x40,
    rpc="PrepareBatch",
    http="POST /v1/batches:prepare",
    needs=(Access(Right.PRODUCE, "shares.topic"),),
    repeat=Repeat.KEYED,
)
class PrepareBatch(Command[Prepared], gc=False):
    """Store one part of a batch, durable and invisible.

    Repeating it with the same content returns the same ids; with other content it raises IdempotencyConflict. Give the
    sink and the version that the batch will be committed as, if any: a part that comes after that version, or a later
    one, was committed is rejected (BatchDecided). Without them it is rejected only while the commit of its batch is
    remembered; otherwise it stays prepared until the batch times out.
    """

    batch_id: ShortName
    part: ShortName
    shares: list[Share]
    producer_id: ProducerName | None = None
    epoch: Epoch | None = None
    answered_below: AnsweredBelow | None = None
    without_results: bool = False  # answer only that the part is durable
    sink: ShortName | None = None
    version: Natural | None = None

    def validate(self) -> None:
        _check_version(self)
        if not self.shares:
            raise BadRequest("a part needs a topic; name one, even if the part has no messages")
        names: set[str] = set()
        for share in self.shares:
            name = canonical_topic(share.topic)
            if name in names:
                raise BadRequest(f"topic {name!r} is given twice in part {self.part!r}; put its messages together")
            names.add(name)
        seqs = [share.messages.seqs for share in self.shares if len(share.messages)]
        has_all = all(s is not None and min(memoryview(s).cast("B").cast("q")) >= 0 for s in seqs)
        check_identity(self, any(s is not None for s in seqs), has_all)


@batch_call(id=0x41, rpc="CommitBatch", http="POST /v1/batches:commit", needs=PRODUCE_ANYWHERE, repeat=Repeat.KEYED)
class CommitBatch(Command[Count]):
    """Make exactly the named parts visible, in all topics together, and drop the others.

    A part that is not prepared fails the whole commit (UnknownPart). Repeating it changes nothing. With a sink and a
    version it is one of a series of commits whose versions rise: a commit of the sink's last version or a lower one
    changes nothing, drops what was prepared under its batch, and returns what the first one did, or 0 if that is no
    longer known.
    """

    batch_id: ShortName
    parts: Annotated[list[ShortName], Meta(max_length=100_000)]
    sink: ShortName | None = None
    version: Natural | None = None

    def validate(self) -> None:
        _check_version(self)


def _check_version(command: PrepareBatch | CommitBatch) -> None:
    if (command.sink is None) != (command.version is None):
        raise BadRequest("a sink needs a version, and a version a sink; give both or neither")


@batch_call(id=0x42, rpc="AbortBatch", http="POST /v1/batches:abort", needs=PRODUCE_ANYWHERE)
class AbortBatch(Command[Count]):
    """Drop all parts of a batch that was not committed, and return how many there were."""

    batch_id: ShortName


@batch_call(id=0x43, rpc="ListBatches", http="GET /v1/batches", needs=PRODUCE_ANYWHERE, route="all", merge="pages")
class ListBatches(Command[Page[BatchInfo]]):
    """List batches that are undecided or were committed recently."""

    cursor: Cursor | None = None
    limit: Limit = 1000


@batch_call(id=0x44, rpc="ForgetBatch", needs=ADMIN_EVERYWHERE, audit=("batch_id",))
class ForgetBatch(Command[None]):
    """Drop the decision of a committed batch as soon as every topic has applied it: its commit is never repeated."""

    batch_id: ShortName


@batch_call(id=0x45, rpc="ListSinks", http="GET /v1/sinks", needs=ADMIN_EVERYWHERE, route="all", merge="pages")
class ListSinks(Command[Page[SinkInfo]]):
    """List the sinks that batches were committed for, each with its last commit."""

    cursor: Cursor | None = None
    limit: Limit = 1000


class Known(Struct, frozen=True):
    known: bool  # whether it existed


@batch_call(
    id=0x46,
    rpc="ForgetSink",
    http="DELETE /v1/sinks/{name}",
    needs=ADMIN_EVERYWHERE,
    repeat=Repeat.ONCE,
    destroys=True,
    audit=("name",),
    route="sink",
)
class ForgetSink(Command[Known]):
    """Forget which version of a sink was committed last, so that its versions may start again.

    A writer that still repeats a commit of the sink would duplicate its messages.
    """

    name: ShortName
