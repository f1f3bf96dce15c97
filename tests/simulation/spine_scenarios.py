"""Short scenarios in which a single clause of the spine protocol keeps the bound.

Each is written for the unchanged protocol, and must end without a complaint. With the clause removed
(`spine_mutants.py`) the same messages arrive in the same order, and the oracle must complain. A named message
may be missing: a protocol that sends less is no reason to stop.
"""

from __future__ import annotations

from tests.simulation.spine_protocol.coordinator import Spine
from tests.simulation.spine_protocol.messages import (
    Acknowledge,
    Cancel,
    LeaseAnswer,
    LeaseRequest,
    OpenEpoch,
    Publish,
    Rebudget,
)
from tests.simulation.spine_protocol.publisher import Publisher
from tests.simulation.spine_world import Message, World


class Story:
    def __init__(self, k: int, partitions: int, publisher: type[Publisher], spine: type[Spine]) -> None:
        self.world = World(k, partitions, publisher_class=publisher, spine_class=spine)
        self.world.collect()
        self.kept: list[tuple[int, int, Message]] = []

    def arrives(self, number: int, *kinds: type[Message]) -> None:
        """Deliver the oldest message of each kind to or from this partition, if there is one."""
        for kind in kinds:
            for i, (whose, _, message) in enumerate(self.world.network):
                if whose == number and isinstance(message, kind):
                    self.world._arrive(*self.world.network.pop(i))
                    break
            self.world.collect()

    def all_arrives(self, *but: tuple[int, type[Message]]) -> None:
        """Deliver everything, and what follows from it, except these kinds to or from these partitions."""
        world = self.world
        for _ in range(200):
            moving = [item for item in world.network if (item[0], type(item[2])) not in but]
            if not moving:
                break
            world.network.remove(moving[0])
            world._arrive(*moving[0])
            world.collect()

    def is_kept(self, number: int, kind: type[Message]) -> None:
        """Delay the messages in transit until `comes_late`."""
        self.kept += [item for item in self.world.network if item[0] == number and isinstance(item[2], kind)]
        self.world.network = [item for item in self.world.network if item not in self.kept]

    def comes_late(self) -> None:
        for item in self.kept:
            self.world._arrive(*item)
            self.world.collect()
        self.kept.clear()

    def loses_all(self) -> None:
        self.world.network.clear()

    def enqueues(self, number: int, *keys: int) -> None:
        for key in keys:
            self.world._ids += 1
            self.world.partitions[number].enqueue((key, self.world._ids), self.world.now)
            self.world.collect()

    def eligible(self, number: int) -> list[int]:
        return [key for key, _ in self.world.partitions[number].queue.ready]

    def pops(self) -> None:
        self.world.pops.append((self.world.spine.epoch, self.world.spine.pop(1, self.world.now)))
        self.world.collect()

    def does(self, what: str, x: int = 0) -> None:
        getattr(self.world, what)(x, 0)
        self.world.collect()

    def ends(self) -> list[str]:
        if not self.world.complaints:
            self.world.heal()
        return self.world.complaints


def worse_head_in_flight(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """Partition 1 leases 10 and answers with head 30. Before that arrives, 15 is enqueued: it is better than 30."""
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.enqueues(1, 10, 30)
    story.all_arrives()
    story.pops()
    story.arrives(1, LeaseRequest)
    story.enqueues(1, 15)
    story.arrives(1, LeaseAnswer)
    story.pops()
    story.arrives(0, LeaseRequest)
    return story.ends()


def better_head_not_yet_acknowledged(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """Partition 1 published a 10 and no spine received it: 10 must not be eligible."""
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.enqueues(1, 30)
    story.all_arrives()
    story.enqueues(1, 10)
    story.pops()
    story.arrives(0, LeaseRequest)
    return story.ends()


def outdated_request_after_better_head(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """A request to partition 0 is cancelled, others follow, 5 is acknowledged; then the first request arrives."""
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20, 21)
    story.enqueues(1, 30)
    story.all_arrives()
    story.pops()
    story.is_kept(0, LeaseRequest)
    story.does("withdraw")
    story.all_arrives()
    story.pops()  # a second request, answered and done
    story.all_arrives()
    story.enqueues(1, 5)
    story.all_arrives()
    story.comes_late()
    return story.ends()


def cancelled_request_arrives(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.enqueues(1, 30)
    story.all_arrives()
    story.pops()
    story.is_kept(0, LeaseRequest)
    story.does("withdraw")
    story.arrives(0, Cancel, LeaseAnswer)
    story.enqueues(1, 5)
    story.all_arrives()
    story.comes_late()
    return story.ends()


def better_head_while_request_is_under_way(
    publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine
) -> list[str]:
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.enqueues(1, 30)
    story.all_arrives()
    story.pops()
    story.enqueues(1, 5)
    story.arrives(1, Publish, Acknowledge)
    story.arrives(0, LeaseRequest)
    return story.ends()


def clock_runs_out(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """A request is in transit for long, and a better head arrives; then the request reaches its partition."""
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.enqueues(1, 30)
    story.all_arrives()
    story.pops()
    story.is_kept(0, LeaseRequest)
    story.enqueues(1, 5, 6)
    for _ in range(6):
        story.does("time", 15)
        story.all_arrives((0, LeaseRequest), (0, Cancel))
    story.comes_late()
    return story.ends()


def request_of_earlier_boot(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """A request was answered with nothing, which is not on disk; its duplicate arrives after a restart."""
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.enqueues(1, 30)
    story.all_arrives()
    story.pops()
    story.is_kept(0, LeaseRequest)
    story.does("withdraw")
    story.all_arrives()
    story.does("crash", 0)
    story.does("restart")
    story.enqueues(1, 5)
    story.all_arrives()
    story.comes_late()
    return story.ends()


def restart_with_head_in_flight(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """Partition 1 restarts; the spine still believes it empty. New messages must wait."""
    story = Story(2, 2, publisher, spine)
    story.enqueues(0, 20)
    story.all_arrives()
    story.enqueues(1, 10)  # within the budget of one, and the publication is lost
    story.loses_all()
    story.does("crash", 1)
    story.does("restart")
    story.loses_all()
    story.enqueues(1, 11)
    story.pops()
    story.arrives(0, LeaseRequest)
    return story.ends()


def new_spine_acknowledges_early(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """Partition 0 lacks the new spine's epoch and gets a request of the old one; 5 is eligible at partition 1."""
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.enqueues(1, 30)
    story.all_arrives()
    story.pops()
    story.does("new_spine")
    story.arrives(1, OpenEpoch, Publish)
    story.enqueues(1, 5)
    story.arrives(1, Publish, Publish, Acknowledge, Acknowledge)
    story.arrives(0, LeaseRequest)
    return story.ends()


def new_spine_and_heads_of_old(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """Partition 1 opened the new epoch with a head that the old spine does not have; partition 0 obeys the old one."""
    story = Story(1, 2, publisher, spine)
    story.enqueues(0, 20)
    story.all_arrives()
    story.enqueues(1, 5)  # held: the spine believes partition 1 empty
    story.loses_all()
    story.pops()
    story.does("new_spine")
    story.arrives(1, OpenEpoch)
    story.arrives(0, LeaseRequest)
    return story.ends()


def new_spine_with_larger_budget(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """Three partitions under K = 3 may hold one each. The new spine counts two of them, which may hold two."""
    story = Story(3, 3, publisher, spine)
    story.enqueues(1, 50)
    story.all_arrives()
    story.enqueues(2, 30)
    story.loses_all()
    story.pops()
    story.world.throttled[2] = "maintenance"
    story.does("new_spine")
    story.arrives(0, OpenEpoch)
    story.enqueues(0, 10, 11)
    story.arrives(1, LeaseRequest)
    return story.ends()


def growth_before_budget_is_kept(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """Two partitions under K = 3 may hold two each; a third joins, and partition 0 has not been informed."""
    story = Story(3, 2, publisher, spine)
    story.enqueues(1, 50)
    story.all_arrives()
    story.enqueues(0, 10, 11)
    story.loses_all()
    story.does("grow")
    story.all_arrives((0, Rebudget))
    story.enqueues(2, 12)
    story.is_kept(2, Publish)
    story.pops()
    story.arrives(1, LeaseRequest)
    return story.ends()


def _throttled_and_back(publisher: type[Publisher], spine: type[Spine]) -> Story:
    """Budgets were 1, then 2 while partition 2 was throttled (partition 0 receives that late), and are 1 again."""
    story = Story(3, 3, publisher, spine)
    story.enqueues(1, 50)
    story.all_arrives()
    story.does("throttle", 2)
    story.is_kept(0, Rebudget)
    story.all_arrives()
    story.does("unthrottle")
    story.all_arrives()
    return story


def outdated_budget(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    story = _throttled_and_back(publisher, spine)
    story.comes_late()
    story.enqueues(2, 12)
    story.enqueues(0, 10, 11)
    story.pops()
    story.arrives(1, LeaseRequest)
    return story.ends()


def budget_of_earlier_boot(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    story = _throttled_and_back(publisher, spine)
    story.does("crash", 0)
    story.does("restart")
    story.comes_late()
    story.enqueues(2, 12)
    story.enqueues(0, 10, 11)
    story.pops()
    story.arrives(1, LeaseRequest)
    return story.ends()


def repeated_opening_after_restart(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    """The epoch was opened with two partitions and a budget of two; now there are three, and partition 0 restarts."""
    story = Story(3, 2, publisher, spine)
    for item in list(story.world.network):
        story.kept += [item] if item[0] == 0 and isinstance(item[2], OpenEpoch) else []
    story.enqueues(1, 50)
    story.all_arrives()
    story.does("grow")
    story.all_arrives()
    story.does("crash", 0)
    story.does("restart")
    story.comes_late()
    story.enqueues(2, 12)
    story.enqueues(0, 10, 11)
    story.pops()
    story.arrives(1, LeaseRequest)
    return story.ends()


def lost_publication(publisher: type[Publisher] = Publisher, spine: type[Spine] = Spine) -> list[str]:
    story = Story(1, 2, publisher, spine)
    story.all_arrives()
    story.enqueues(1, 5)
    story.loses_all()
    return story.ends()
