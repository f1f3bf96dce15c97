"""The topics of a data directory (data_directory.py): open and close all; create, change and delete one.

A growth is in the topic's journal before it is in the catalog (topic_growth.py).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar

from heapline.clock import Clock, SystemClock
from heapline.contract.config import (
    DEFAULT_NAMESPACE,
    FIXED_FIELDS,
    REOPENING_FIELDS,
    BrokerConfig,
    TopicConfig,
    make_config,
    parse_topic,
)
from heapline.contract.errors import (
    BadRequest,
    Closed,
    CorruptionError,
    HeaplineError,
    JournalCorrupt,
    StorageFull,
    TopicExists,
    TopicNotFound,
)
from heapline.contract.message import TopicAudit, TopicInfo
from heapline.core.ids import unix_ms_of
from heapline.core.partition import Draw
from heapline.engine.batches.coordinator import BatchCoordinator
from heapline.engine.batches.decisions import NAME as DECISIONS
from heapline.engine.batches.decisions import Decisions
from heapline.engine.catalog import Catalog, Entry
from heapline.engine.data_directory import DataDirectory
from heapline.engine.internal_topic import CONFIG, NAMESPACE, InternalTopic
from heapline.engine.io import Io, ThreadIo
from heapline.engine.last_audit import write_audit
from heapline.engine.loaded_topic import Loader
from heapline.engine.replays.manager import ReplayJobs
from heapline.engine.runner import InstallHook, TopicRunner
from heapline.engine.schedules.scheduler import Scheduler
from heapline.engine.schedules.store import NAME as SCHEDULES
from heapline.engine.schedules.store import ScheduleStore
from heapline.engine.series import SeriesKeeper
from heapline.engine.topic_growth import change, check_growth, grow
from heapline.journal.disk import Disk, RealDisk, is_no_space
from heapline.logs import Log
from heapline.owned_tasks import OwnedTasks

log = Log("heapline.engine")
P = ParamSpec("P")
T = TypeVar("T")

LOAD_PAUSES = (0.05, 0.2, 0.8)  # seconds between attempts to load a topic that cannot be read


def _to_its_end(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Finish a change of the catalog even if its caller is cancelled, and make the next change wait: the thread would
    not stop, and two concurrent writes of the catalog would lose a topic."""

    @functools.wraps(method)
    async def shielded(self: TopicKeeper, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.changes.run_to_completion(method(self, *args, **kwargs))

    return shielded


class KeeperOptions(TypedDict, total=False):
    """Settings, and the parts of the world that tests and simulations replace."""

    config: BrokerConfig | None
    disk: Disk | None
    io: Io | None
    clock: Clock | None
    draw: Draw | None
    draw_id_suffix: Callable[[], int] | None


class TopicKeeper:
    """The broker as handlers see it: the topics that are open, and the services that all of them share."""

    def __init__(
        self,
        path: str,
        *,
        config: BrokerConfig | None = None,
        disk: Disk | None = None,
        io: Io | None = None,
        clock: Clock | None = None,
        draw: Draw | None = None,
        draw_id_suffix: Callable[[], int] | None = None,
    ) -> None:
        self._config = config or BrokerConfig()
        self.changes = OwnedTasks()  # of the catalog
        self._io: Io | None = io
        self._clock: Clock = clock or SystemClock()
        self._runners: dict[str, TopicRunner] = {}
        self._refused: dict[str, CorruptionError] = {}
        self.directory = DataDirectory(path, disk or RealDisk(), self._config, self._clock, draw, draw_id_suffix)
        self._catalog: Catalog | None = None
        self._admin = asyncio.Lock()
        self.batches = BatchCoordinator(
            Decisions(InternalTopic(DECISIONS, self._make_internal)),
            wall_ms=self._clock.wall_ms,
            missing=self._why_missing,
            serving=lambda: [runner for runner in self._runners.values() if runner.is_serving],
        )
        self.schedules = Scheduler(
            ScheduleStore(InternalTopic(SCHEDULES, self._make_internal)), topic=self.runner, wall_ms=self._clock.wall_ms
        )
        self.replays = ReplayJobs(self.disk, path, self._io_or_fail, self._clock, self.runner)
        self.series = SeriesKeeper(path, self.disk, self._clock, lambda: self._io, self._runners.values)
        self._closed = False

    @property
    def path(self) -> str:
        """The data directory."""
        return self.directory.path

    @property
    def config(self) -> BrokerConfig:
        return self._config

    @property
    def clock(self) -> Clock:
        return self._clock

    # -- lifecycle -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        if self._io is None:
            self._io = ThreadIo()
        self._catalog = await self._io.run(self.directory.open)
        entries = dict(self._catalog.entries)
        system = entries.pop((NAMESPACE, DECISIONS), None)
        if system is not None:
            await self._open_decisions(system)  # first: the others apply its decisions
        kept = entries.pop((NAMESPACE, SCHEDULES), None)
        if kept is not None:
            await self._open_internal(self.schedules.store.topic, kept)
        loads = [self._load(entry) for entry in entries.values()]
        ends = await asyncio.gather(*loads, return_exceptions=True)  # all of them, before anything is released
        for error in filter(None, ends):
            raise error
        for entry in list(self._catalog.entries.values()):
            await self._line_up(entry)
        self.batches.start(self._config.batch_timeout, self._config.decision_retention)
        self.schedules.start()
        self.replays.open()
        if self._config.series:
            await self.series.open()

    # -- internal topics -------------------------------------------------------------------------------------------

    async def _open_internal(self, topic: InternalTopic, entry: Entry) -> None:
        """Open an internal topic. If it is corrupt, only what needs it does not work."""
        loader = self.directory.loader(entry)
        try:
            topic.runner = await self._start_runner(loader)
        except (CorruptionError, OSError) as error:
            if isinstance(error, OSError) and is_no_space(error):
                raise
            log.error("internal topic cannot be opened", topic=entry.topic, error=str(error))
            topic.refusal = error if isinstance(error, CorruptionError) else _unreadable(loader, error)

    async def _open_decisions(self, entry: Entry) -> None:
        """Open the system journal and read the decisions. If they cannot be read, the next call reads them again."""
        decisions = self.batches.decisions
        await self._open_internal(decisions.topic, entry)
        if decisions.topic.runner is not None:
            try:
                await decisions.open()
            except (CorruptionError, OSError) as error:
                if isinstance(error, OSError) and is_no_space(error):
                    raise
                log.error("decisions about batches cannot be read", error=str(error))

    @_to_its_end
    async def _make_internal(self, topic: InternalTopic) -> TopicRunner:
        """Create and load an internal topic."""
        async with self._admin:
            if topic.runner is None:
                entry = self._catalog_or_fail().entries.get((NAMESPACE, topic.name))
                if entry is None:  # otherwise it was created, but not loaded
                    entry = await self._on_disk(
                        self.directory.make_topic, self._catalog_or_fail(), NAMESPACE, topic.name, CONFIG
                    )
                topic.runner = await self._start_runner(self.directory.loader(entry))
            return topic.runner

    def _why_missing(self) -> HeaplineError | None:
        """Return why some topics are not served, or None. A transient reason comes first."""
        for runner in self._runners.values():
            if runner.failure is not None:
                return runner.failure.with_traceback(None)
        return next(iter(self._refused.values()), None)

    async def _load(self, entry: Entry) -> None:
        loader = self.directory.loader(entry)
        try:
            runner = await self._start_runner(loader, self.batches.catch_up)
        except CorruptionError as error:
            log.error("topic refused", topic=entry.topic, error=str(error))
            self._refused[entry.topic] = error
        except OSError as error:
            if is_no_space(error):
                raise
            # One unreadable topic must not prevent the others from opening.
            log.error("topic refused", topic=entry.topic, error=str(error))
            self._refused[entry.topic] = _unreadable(loader, error)
        else:
            self._runners[entry.topic] = runner

    async def _line_up(self, entry: Entry) -> Entry:
        """Update the catalog from the journal if a growth was not recorded in it (see topic_growth.py). If that fails,
        serve nevertheless: the next change or open retries it."""
        wanted = self._settings(entry)
        if wanted is entry.config:
            return entry
        try:
            return await self._io_or_fail().run(self._catalog_or_fail().change, entry, wanted)
        except OSError as error:
            log.warning(
                "catalog not updated with the added partitions; will retry", topic=entry.topic, error=str(error)
            )
            return entry

    def _settings(self, entry: Entry) -> TopicConfig:
        """Return the topic's settings: the catalog's, unless the topic has grown and the catalog is not updated yet."""
        runner = self._runners.get(entry.topic)
        if runner is not None and runner.is_serving and runner.loaded.topic.config.partitions > entry.config.partitions:
            return runner.loaded.topic.config
        return entry.config

    async def _start_runner(self, loader: Loader, on_install: InstallHook | None = None) -> TopicRunner:
        """Load a topic. A failed read is retried before the topic is refused."""
        io = self._io_or_fail()
        for pause in LOAD_PAUSES:
            try:
                return await TopicRunner.open(loader, io, self._clock, self._config, on_install)
            except OSError as error:
                if is_no_space(error):
                    raise
                log.warning("load failed", topic=loader.name, error=str(error), retry_in=pause)
            await asyncio.sleep(pause)
        return await TopicRunner.open(loader, io, self._clock, self._config, on_install)

    def _io_or_fail(self) -> Io:
        if self._io is None or self._closed:
            raise Closed
        return self._io

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self.replays.close()
            await self.series.close()
            await self._close_topics()
        finally:
            # A thread does not stop when its caller is cancelled: the directory is released after the last thread ends.
            if self._io is not None:
                self._io.close()
            self.directory.release()

    @property
    def disk(self) -> Disk:
        return self.directory.disk

    def _all_runners(self) -> list[TopicRunner]:
        internal = (self.batches.decisions.topic.runner, self.schedules.store.topic.runner)
        return [*self._runners.values(), *filter(None, internal)]

    async def _close_topics(self) -> None:
        await self.schedules.close()
        for runner in self._all_runners():
            if runner.is_serving and runner.loaded.journal.written_unit > runner.loaded.snapshot_unit:
                try:
                    await runner.maintenance.snapshot()
                except Exception as error:  # the journal is enough
                    log.warning("no snapshot on close", topic=runner.name, error=repr(error))
        await asyncio.gather(*(runner.close() for runner in self._all_runners()))
        async with self._admin:  # a topic may be being created
            await asyncio.gather(*(runner.close() for runner in self._all_runners()))
        await self.batches.close()

    def runner(self, topic: str) -> TopicRunner:
        """Return the runner of a topic, or raise why it is not served."""
        if self._closed or self._catalog is None:
            raise Closed
        runner = self._runners.get(topic)
        if runner is None:
            namespace, name = parse_topic(topic)
            short = name if namespace == DEFAULT_NAMESPACE else f"{namespace}/{name}"
            runner = self._runners.get(short)
            if runner is None:
                if short in self._refused:
                    raise self._refused[short]
                raise TopicNotFound(topic)
        return runner

    # -- topics ----------------------------------------------------------------------------------------------------

    def _entry(self, topic: str) -> Entry:
        namespace, name = parse_topic(topic)
        entry = self._catalog_or_fail().entries.get((namespace, name))
        if entry is None:
            raise TopicNotFound(topic)
        return entry

    def _catalog_or_fail(self) -> Catalog:
        if self._catalog is None or self._closed:
            raise Closed
        return self._catalog

    @_to_its_end
    async def make_topic(self, topic: str, settings: dict[str, Any]) -> TopicInfo:
        namespace, name = parse_topic(topic)
        wanted = make_config(settings)
        async with self._admin:
            catalog = self._catalog_or_fail()
            entry = catalog.entries.get((namespace, name))
            if entry is not None:
                entry = await self._line_up(entry)
                differing = [f for f in TopicConfig.__struct_fields__ if getattr(wanted, f) != getattr(entry.config, f)]
                if differing:
                    fixed = [f for f in differing if f in FIXED_FIELDS]
                    raise TopicExists.with_fixed(topic, differing, fixed) if fixed else TopicExists(topic, differing)
                if entry.topic not in self._runners and entry.topic not in self._refused:
                    await self._load(entry)  # it was created, but could not be loaded then
                return _info(entry)
            entry = await self._on_disk(self.directory.make_topic, catalog, namespace, name, wanted)
            await self._load(entry)
            return _info(entry)

    async def _on_disk(self, work: Callable[..., T], *args: Any) -> T:
        """Run work on the directory in a thread. A full disk raises StorageFull."""
        try:
            return await self._io_or_fail().run(work, *args)
        except OSError as error:
            if is_no_space(error):
                raise StorageFull from error
            raise

    @_to_its_end
    async def record_audit(self, topic: str, found: TopicAudit) -> None:
        """Keep the result of an audit, durably. Results are written one by one, and not while the topic is deleted."""
        async with self._admin:
            runner = self.runner(topic)
            await self._on_disk(write_audit, self.directory.disk, runner.loader.directory, found)
            runner.audit = found

    @_to_its_end
    async def change_topic(self, topic: str, settings: dict[str, Any]) -> TopicInfo:
        runner = self.runner(topic)
        async with self._admin:
            entry = self._entry(topic)
            runner.check()  # a reloading topic may turn out to have grown
            wanted = make_config(settings, self._settings(entry))
            fixed = [f for f in FIXED_FIELDS if getattr(wanted, f) != getattr(entry.config, f)]
            if fixed:
                raise BadRequest(f"{', '.join(fixed)} of a topic cannot be changed; create another topic")
            check_growth(self._settings(entry).partitions, wanted.partitions)
            before = entry.config
            grows = wanted.partitions > before.partitions
            if grows:  # the journal first: see topic_growth.py
                await grow(runner, wanted)
            else:
                entry = await self._on_disk(self._catalog_or_fail().change, entry, wanted)
                runner.loader.config = wanted
                await runner.call(partial(change, runner, wanted))
            if any(getattr(wanted, f) != getattr(before, f) for f in REOPENING_FIELDS):
                await runner.reopen()
            if grows:
                entry = await self._on_disk(self._catalog_or_fail().change, entry, wanted)
            return _info(entry)

    def topic_infos(self) -> list[TopicInfo]:
        entries = self._catalog_or_fail().entries.values()
        users = (e for e in entries if e.namespace != NAMESPACE)
        return sorted((_info(e) for e in users), key=lambda info: info.name)

    def topic_info(self, topic: str) -> TopicInfo:
        return _info(self._entry(topic))

    def check_open(self) -> None:
        self._catalog_or_fail()

    async def fire_schedules(self) -> None:
        self._catalog_or_fail()
        await self.schedules.fire_due()

    @_to_its_end
    async def remove_topic(self, topic: str) -> None:
        io = self._io_or_fail()
        async with self._admin:
            entry = self._entry(topic)
            runner = self._runners.pop(entry.topic, None)
            last_ms = 0
            if runner is not None:
                await runner.close(TopicNotFound(topic))
                last_ms = max(unix_ms_of(p.state.ids.last) for p in runner.loaded.topic.partitions)
            # Once the catalog does not name it, the topic is deleted. Its folder is removed now or at the next open.
            try:
                await self._on_disk(self._catalog_or_fail().remove, entry, last_ms)
            except (OSError, StorageFull):
                await self._load(entry)
                raise
            self._refused.pop(entry.topic, None)
            try:
                await io.run(self.directory.remove_topic, entry)
            except OSError as error:
                log.warning("topic directory not deleted; will retry on next open", topic=entry.topic, error=str(error))


def _unreadable(loader: Loader, error: OSError) -> JournalCorrupt:
    path = str(error.filename or loader.directory)
    return JournalCorrupt(path, 0, f"it cannot be read ({error.strerror or error})")


def _info(entry: Entry) -> TopicInfo:
    return TopicInfo(name=entry.topic, incarnation=entry.incarnation, config=entry.config, id_suffix=entry.id_suffix)
