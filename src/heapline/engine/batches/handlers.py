"""Handlers of prepared batches and sinks."""

from __future__ import annotations

from operator import attrgetter

from heapline.contract import batches
from heapline.contract.call import Context, Count, Page, page_of
from heapline.contract.message import BatchInfo, SinkInfo
from heapline.contract.messages import pack_enqueued
from heapline.engine.columns import Columns
from heapline.engine.handlers import handles
from heapline.engine.messages import identity_of
from heapline.engine.topics import TopicKeeper


@handles(batches.PrepareBatch)
async def prepare_batch(broker: TopicKeeper, command: batches.PrepareBatch, context: Context) -> batches.Prepared:
    runners = [broker.runner(share.topic) for share in command.shares]
    shares = {}
    for runner, share in zip(runners, command.shares, strict=True):
        columns = shares[runner] = Columns.of_batch(share.messages)
        columns.check(runner.loaded.topic.config, runner.name, atomic=True)
    identity = identity_of(command)
    quietly = command.without_results and identity is None
    quietly = quietly and all(columns.tokens is None and columns.count for columns in shares.values())
    answers = await broker.batches.prepare(
        command.batch_id, command.part, shares, identity, *_version_of(command), quietly=quietly
    )
    if command.without_results:
        return batches.Prepared()
    return batches.Prepared(
        [batches.PreparedShare(r.name, pack_enqueued(answers[r], r.loaded.topic.id_suffix)) for r in runners]
    )


@handles(batches.CommitBatch)
async def commit_batch(broker: TopicKeeper, command: batches.CommitBatch, context: Context) -> Count:
    broker.check_open()
    return Count(await broker.batches.commit(command.batch_id, command.parts, *_version_of(command)))


def _version_of(command: batches.PrepareBatch | batches.CommitBatch) -> tuple[str, int]:
    return command.sink or "", -1 if command.version is None else command.version


@handles(batches.AbortBatch)
async def abort_batch(broker: TopicKeeper, command: batches.AbortBatch, context: Context) -> Count:
    broker.check_open()
    return Count(await broker.batches.abort(command.batch_id))


@handles(batches.ForgetBatch)
async def forget_batch(broker: TopicKeeper, command: batches.ForgetBatch, context: Context) -> None:
    broker.batches.nobody_repeats(command.batch_id)


@handles(batches.ListBatches)
async def list_batches(broker: TopicKeeper, command: batches.ListBatches, context: Context) -> Page[BatchInfo]:
    broker.check_open()
    return page_of(await broker.batches.listed(), command.cursor, command.limit, attrgetter("batch_id"))


@handles(batches.ListSinks)
async def list_sinks(broker: TopicKeeper, command: batches.ListSinks, context: Context) -> Page[SinkInfo]:
    broker.check_open()
    return page_of(await broker.batches.sinks(), command.cursor, command.limit)


@handles(batches.ForgetSink)
async def forget_sink(broker: TopicKeeper, command: batches.ForgetSink, context: Context) -> batches.Known:
    broker.check_open()
    return batches.Known(await broker.batches.forget_sink(command.name))
