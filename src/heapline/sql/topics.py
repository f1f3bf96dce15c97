"""Handlers of calls on a topic as a whole: create, change, list, delete, pause, purge."""

from __future__ import annotations

import asyncio
import secrets

import asyncpg

from heapline.contract import topics
from heapline.contract.call import Context, Count, Page, page_of
from heapline.contract.check import instant_to_ms
from heapline.contract.config import FIXED_FIELDS, TopicConfig, check_features, make_config
from heapline.contract.errors import BadRequest, TopicExists, TopicNotFound, Unsupported
from heapline.contract.ids import SUFFIX_BITS
from heapline.contract.message import TopicInfo
from heapline.contract.topics import given
from heapline.sql.config import FEATURES
from heapline.sql.handlers import handles
from heapline.sql.home import Home
from heapline.sql.node import Node
from heapline.sql.shard import Name, Shard, Turn, read_config, write_config
from heapline.sql.statements import statement

#: Statements that delete everything of a topic.
_DELETIONS = (
    "delete_ready_of_topic",
    "delete_delayed_of_topic",
    "delete_leases_of_topic",
    "delete_dead_of_topic",
    "delete_keys_of_topic",
    "delete_producers_of_topic",
    "delete_sequences_of_topic",
    "delete_prepared_of_topic",
    "delete_prepared_keys_of_topic",
    "delete_prepared_sequences_of_topic",
    "delete_event_ends_of_topic",
    "delete_topic",
)


@handles(topics.CreateTopic)
async def create_topic(node: Node, command: topics.CreateTopic, context: Context) -> TopicInfo:
    home = node.home(command.topic)
    wanted = make_config(given(command.config))
    check_features(wanted, FEATURES)

    async def work(connection: asyncpg.Connection) -> TopicInfo:
        try:
            topic = (await home.shard.enter(connection, home.name)).topic
        except TopicNotFound:
            return await _insert(connection, home.name, wanted)
        differing = [f for f in TopicConfig.__struct_fields__ if getattr(wanted, f) != getattr(topic.config, f)]
        if differing:
            fixed = [f for f in differing if f in FIXED_FIELDS]
            name = command.topic
            raise TopicExists.with_fixed(name, differing, fixed) if fixed else TopicExists(name, differing)
        return topic.info

    return await home.shard.run(work, home.name)


async def _insert(connection: asyncpg.Connection, name: Name, config: TopicConfig) -> TopicInfo:
    suffix = secrets.randbits(SUFFIX_BITS)
    id = await connection.fetchval(statement("insert_topic"), *name, write_config(config), suffix)
    return TopicInfo(name=name.canonical, incarnation=id, config=config, id_suffix=suffix)


@handles(topics.UpdateTopic)
async def update_topic(node: Node, command: topics.UpdateTopic, context: Context) -> TopicInfo:
    home = node.home(command.topic)

    async def work(turn: Turn) -> TopicInfo:
        before = turn.topic.config
        wanted = make_config(given(command.config), before)
        fixed = [f for f in FIXED_FIELDS if getattr(wanted, f) != getattr(before, f)]
        if fixed:
            raise BadRequest(f"{', '.join(fixed)} of a topic cannot be changed; create another topic")
        check_features(wanted, FEATURES)
        await turn.connection.execute(statement("update_config"), turn.topic.id, write_config(wanted))
        return turn.topic._replace(config=wanted).info

    info = await home.shard.in_topic(home.name, work)
    home.forget()
    await home.flush()  # a strict order, or a limit, counts what was enqueued before
    home.wake()
    return info


@handles(topics.DeleteTopic)
async def delete_topic(node: Node, command: topics.DeleteTopic, context: Context) -> None:
    home = node.home(command.topic)
    await home.flush()

    async def work(turn: Turn) -> None:
        for deletion in _DELETIONS:
            await turn.connection.execute(statement(deletion), turn.topic.id)

    await home.shard.in_topic(home.name, work)
    home.forget()
    home.wake()


@handles(topics.ListTopics)
async def list_topics(node: Node, command: topics.ListTopics, context: Context) -> Page[TopicInfo]:
    return page_of(await list_infos(node), command.cursor, command.limit)


async def list_infos(node: Node) -> list[TopicInfo]:
    """Return every topic, by name."""
    shares = await asyncio.gather(*(_topics_of(shard) for shard in node.shards))
    return sorted((info for share in shares for info in share), key=lambda info: info.name)


async def _topics_of(shard: Shard) -> list[TopicInfo]:
    async with shard.connection() as connection:
        rows = await connection.fetch(statement("list_topics"))
    return [
        TopicInfo(
            name=Name(row["namespace"], row["name"]).canonical,
            incarnation=row["id"],
            config=read_config(row["config"])[0],
            id_suffix=row["id_suffix"],
        )
        for row in rows
    ]


@handles(topics.GetTopic)
async def get_topic(node: Node, command: topics.GetTopic, context: Context) -> TopicInfo:
    home = node.home(command.topic)
    return (await home.shard.read_topic(home.name)).topic.info


@handles(topics.PauseTopic)
async def pause_topic(node: Node, command: topics.PauseTopic, context: Context) -> None:
    until = None if command.until is None else instant_to_ms(command.until)
    await _set_pause(node.home(command.topic), True, until)


@handles(topics.ResumeTopic)
async def resume_topic(node: Node, command: topics.ResumeTopic, context: Context) -> None:
    await _set_pause(node.home(command.topic), False, None)


async def _set_pause(home: Home, is_paused: bool, until: int | None) -> None:
    async def work(turn: Turn) -> None:
        await turn.connection.execute(statement("update_pause"), turn.topic.id, is_paused, until)

    await home.shard.in_topic(home.name, work)
    home.wake()


@handles(topics.Purge)
async def purge(node: Node, command: topics.Purge, context: Context) -> Count:
    if command.enqueued_before is not None:
        raise Unsupported("enqueued_before", "purge_count")
    home = node.home(command.topic)
    await home.flush()

    async def work(turn: Turn) -> int:
        count = 0
        for source in ("delayed", "ready"):  # in this order: a message may become ready meanwhile
            end = turn.layout.to_ended("purge", source=source)
            count += await turn.connection.fetchval(end, turn.topic.id, turn.now)
        return count

    return Count(await home.shard.in_topic(home.name, work))
