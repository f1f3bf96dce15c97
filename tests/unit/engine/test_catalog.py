"""The catalog keeps a topic's id suffix: written with the topic's name, durable before the topic exists."""

from __future__ import annotations

import random

import pytest

from heapline.contract.config import TopicConfig
from heapline.contract.errors import CorruptionError
from heapline.contract.ids import SUFFIX_MAX
from heapline.engine.catalog import Catalog
from tests.simulation.fake_disk import FakeDisk, PowerCut
from tests.unit.engine.rig import PATH, opened


def fresh(seed: int) -> tuple[FakeDisk, Catalog]:
    disk = FakeDisk(seed=seed)
    disk.mkdir(PATH)
    disk.fsync_dir("/")
    catalog = Catalog(disk, PATH)
    catalog.make()
    return disk, catalog


@pytest.mark.parametrize("seed", range(20))
def test_power_cut_leaves_a_topic_with_its_suffix_or_no_topic(seed: int) -> None:
    outcomes = set()
    for steps in range(1, 12):
        disk, catalog = fresh(seed)
        entry = catalog.planned("default", "jobs", TopicConfig(), 1 << 57 | steps)
        disk.cut_power_in(steps)
        try:
            catalog.add(entry)
            returned = True
        except PowerCut:
            returned = False
        disk.cut_power_in(None)
        found = Catalog(disk.crash(random.Random(seed)), PATH).entries.get(("default", "jobs"))
        assert found == entry if returned else found in (None, entry)
        outcomes.add((returned, found is not None))
    assert {(False, False), (True, True)} <= outcomes


async def test_suffix_is_drawn_once_per_incarnation_and_kept_by_changes() -> None:
    async with opened() as rig:
        suffix = rig.hl.topics.topic_info("jobs").id_suffix
        assert 0 < suffix <= SUFFIX_MAX
        await rig.topic("other")
        assert rig.hl.topics.topic_info("other").id_suffix != suffix
        await rig.hl.update_topic("jobs", partitions=3)
        await rig.hl.update_topic("jobs", fsync="os")  # which loads the topic again
        assert rig.hl.topics.topic_info("jobs").id_suffix == suffix
        await rig.reopen()
        assert rig.hl.topics.topic_info("jobs").id_suffix == suffix
        await rig.hl.delete_topic("jobs")
        await rig.topic()
        assert rig.hl.topics.topic_info("jobs").id_suffix != suffix


async def test_changed_suffix_in_the_catalog_is_corruption() -> None:
    async with opened() as rig:
        path, suffix = f"{PATH}/catalog.json", rig.hl.topics.topic_info("jobs").id_suffix
        await rig.hl.close()
        data = rig.disk.read_file(path)
        assert data.count(b"%d" % suffix) == 1
        rig.disk.write_file_atomic(path, data.replace(b"%d" % suffix, b"%d" % (suffix ^ 1)))
        with pytest.raises(CorruptionError, match="checksum"):
            Catalog(rig.disk, PATH)
