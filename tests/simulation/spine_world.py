"""A simulated world for the spine: spines, partitions, a network that may do anything, and an oracle.

    complaints = explore(seed=7)            one run; the same seed is the same run
    complaints = World(k=1, partitions=3).play([(step, x, y), ...])

The world moves in steps, each one `(what, x, y)`: deliver any message in transit (x selects it), lose one,
duplicate one, enqueue, pop, ack, let time pass, crash a partition or the spine … `x` and `y` are taken modulo the
number of choices, so any list of steps is a run, and Hypothesis can generate and shrink one. There is no latency:
any message in transit may arrive next or never, which is harsher. In a lazy world disks lag behind: a partition's
messages are sent when its disk has caught up, and a crash undoes what was not on it.

The oracle acts when a partition leases a message, not when the spine or a consumer learns of it: it counts the
messages that are better and eligible at that time in their publishers' queues (those of crashed partitions too), in
the partitions that serve. At the end the network heals, and everything enqueued must be delivered and acked.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tests.simulation.spine_parts import RESEND_MS, SimPartition
from tests.simulation.spine_protocol.coordinator import Delivery, Spine
from tests.simulation.spine_protocol.messages import (
    Acknowledge,
    Cancel,
    Fenced,
    LeaseAnswer,
    LeaseRequest,
    OpenEpoch,
    Place,
    Publish,
    Rebudget,
    ToPartition,
    ToSpine,
)
from tests.simulation.spine_protocol.publisher import Publisher

Step = tuple[str, int, int]
Message = ToPartition | ToSpine

TO_PARTITION = (OpenEpoch, Acknowledge, Rebudget, LeaseRequest, Cancel)
KINDS: tuple[type[Message], ...] = (*TO_PARTITION, Publish, LeaseAnswer, Fenced)

PARTITIONS_MAX = 6
CANCEL_MS = 40
#: Without progress for this many rounds of a lossless network, there will never be any.
HEALING_ROUNDS = 40
HEALING_DELIVERIES = 400

#: How often each step is taken in a random run.
WEIGHTS = {
    "deliver": 60,
    "enqueue": 14,
    "pop": 12,
    "ack": 5,
    "give_back": 3,
    "expire": 3,
    "lose": 4,
    "double": 4,
    "sync": 20,
    "time": 8,
    "stall": 3,
    "withdraw": 2,
    "crash": 1,
    "restart": 3,
    "throttle": 1,
    "unthrottle": 2,
    "grow": 1,
    "rebound": 0.5,
    "new_spine": 0.5,
}
BOUNDS = (1, 1, 2, 3, 4, 5, 7, 9)
FAULTS = set(WEIGHTS) - {"deliver", "enqueue", "pop", "ack", "sync"}
MOODS = (0, 0.3, 1, 3)


class World:
    def __init__(
        self,
        k: int,
        partitions: int,
        *,
        publisher_class: type[Publisher] = Publisher,
        spine_class: type[Spine] = Spine,
    ) -> None:
        self.k, self.now = k, 0
        self.is_lazy = False  # whether disks catch up only at `sync`, instead of immediately
        self.ascent = 0  # -1: every message is better than those before, which uses budgets up; 1: every one is worse
        self.publisher_class, self.spine_class = publisher_class, spine_class
        self.complaints: list[str] = []
        self.ranks: list[int] = []
        self.network: list[tuple[int, int, Message]] = []  # messages in transit: partition, epoch, message
        self.stalled: set[tuple[int, type[Message]]] = set()
        self.partitions: dict[int, SimPartition] = {}
        self.throttled: dict[int, str] = {}
        self.spines: dict[int, Spine] = {}
        self.pops: list[tuple[int, int]] = []  # epoch, pop
        self.in_hand: dict[Place, int] = {}  # messages that consumers hold, and their partition
        self.acked: set[Place] = set()
        self._lessees: dict[Place, tuple[int, int]] = {}  # the lease's epoch and request
        self._delivered: set[tuple[int, int]] = set()
        self._ids = 0
        for number in range(partitions):
            self.partitions[number] = SimPartition(number, publisher_class, self.judge_lease)
        self.new_spine(0, 0)

    # --- the oracle ---

    def judge_lease(self, partition: SimPartition, place: Place) -> None:
        spine = self.spines[partition.publisher.durable.epoch]
        serving = spine.serving
        better = sum(self.partitions[q].queue.count_better_than(place) for q in serving | {partition.number})
        self.ranks.append(better + 1)
        if partition.number not in serving:
            self.complain(f"partition {partition.number} leased {place} while it does not serve")
        if better + 1 > spine.bound:
            self.complain(f"partition {partition.number} leased {place} at rank {better + 1}, K is {spine.bound}")
        if place in self.acked or place in self._lessees:
            self.complain(f"{place} was leased again")
        self._lessees[place] = (spine.epoch, partition.publisher.request)

    def judge_delivery(self, epoch: int, delivery: Delivery) -> None:
        if (epoch, delivery.request) in self._delivered:
            self.complain(f"request {delivery.request} of epoch {epoch} was delivered twice")
        self._delivered.add((epoch, delivery.request))
        for place in delivery.leased:
            if self._lessees.get(place) == (epoch, delivery.request):  # otherwise the lease has expired meanwhile
                self.in_hand[place] = delivery.partition

    def complain(self, what: str) -> None:
        self.complaints.append(f"at {self.now} ms: {what}")

    # --- steps ---

    def play(self, steps: Iterable[Step], *, heal: bool = True) -> list[str]:
        for what, x, y in steps:
            getattr(self, what)(x, y)
            self.collect()
            if self.complaints:
                return self.complaints
        if heal:
            self.heal()
        return self.complaints

    def collect(self) -> None:
        """Put everything that spines and partitions have sent in transit; a crashed partition sends nothing."""
        for spine in self.spines.values():
            self.network += [(number, spine.epoch, message) for number, message in spine.outbox]
            spine.outbox.clear()
            for delivery in spine.deliveries:
                self.judge_delivery(spine.epoch, delivery)
            spine.deliveries.clear()
        for partition in self.partitions.values():
            if partition.is_up and not self.is_lazy:
                self._sync(partition)

    def _sync(self, partition: SimPartition) -> None:
        epoch = partition.publisher.durable.epoch
        self.network += [(partition.number, epoch, message) for message in partition.sync()]

    def sync(self, x: int, y: int) -> None:
        """Let a lazy partition's disk catch up; only now are its messages sent."""
        partition = self.partitions[x % len(self.partitions)]
        if partition.is_up:
            self._sync(partition)

    @property
    def spine(self) -> Spine:
        return self.spines[max(self.spines)]

    def deliver(self, x: int, y: int) -> None:
        moving = [i for i, (number, _, message) in enumerate(self.network) if not self._is_stalled(number, message)]
        if moving:
            self._arrive(*self.network.pop(moving[x % len(moving)]))

    def _is_stalled(self, number: int, message: Message) -> bool:
        return (number, type(message)) in self.stalled

    def _arrive(self, number: int, epoch: int, message: Message) -> None:
        if isinstance(message, TO_PARTITION):
            if self.partitions[number].is_up:
                self.partitions[number].publisher.receive(message, self.now)
            return
        # A Fenced is for every outdated spine, other messages for the spine of their epoch.
        for spine in list(self.spines.values()):
            if spine.epoch == epoch or (isinstance(message, Fenced) and spine.epoch < message.epoch):
                spine.receive(number, message, self.now)

    def stall(self, x: int, y: int) -> None:
        """From now on block one kind of message to or from one partition, or unblock everything."""
        if x % 3 == 0:
            self.stalled.clear()
        else:
            self.stalled.add((x % len(self.partitions), KINDS[y % len(KINDS)]))

    def lose(self, x: int, y: int) -> None:
        if self.network:
            self.network.pop(x % len(self.network))

    def double(self, x: int, y: int) -> None:
        if self.network:
            self.network.append(self.network[x % len(self.network)])

    def enqueue(self, x: int, y: int) -> None:
        partition = self.partitions[x % len(self.partitions)]
        if partition.is_up:
            self._ids += 1
            partition.enqueue((y % 50 + 50 * self.ascent * self._ids, self._ids), self.now)

    def pop(self, x: int, y: int) -> None:
        epochs = sorted(self.spines)[
            -2:
        ]  # mostly the current spine; sometimes one that does not know that it was replaced
        epoch = epochs[-1] if x % 4 or len(epochs) == 1 else epochs[0]
        self.pops.append((epoch, self.spines[epoch].pop(1 + y % 3, self.now)))

    def withdraw(self, x: int, y: int) -> None:
        if self.pops:
            epoch, pop = self.pops.pop(x % len(self.pops))
            self.spines[epoch].withdraw(pop, self.now)

    def _some_in_hand(self, x: int) -> tuple[Place, SimPartition] | None:
        held = [place for place in sorted(self.in_hand) if self.partitions[self.in_hand[place]].is_up]
        if not held:
            return None
        place = held[x % len(held)]
        del self._lessees[place]
        return place, self.partitions[self.in_hand.pop(place)]

    def ack(self, x: int, y: int) -> None:
        if (found := self._some_in_hand(x)) is not None:
            place, partition = found
            partition.queue.leased.remove(place)
            partition.queue.gone.add(place)
            self.acked.add(place)
            self._sync(partition)  # the answer to an ack waits for the disk, like all answers

    def give_back(self, x: int, y: int) -> None:
        """A nack without delay, or a release."""
        if (found := self._some_in_hand(x)) is not None:
            found[1].publisher.offer([found[0]], self.now)

    def expire(self, x: int, y: int) -> None:
        """Expire a lease, whether or not a consumer ever received it."""
        partition = self.partitions[x % len(self.partitions)]
        leased = sorted(partition.queue.leased.difference(partition.publisher.held))
        if partition.is_up and leased:
            place = leased[y % len(leased)]
            self.in_hand.pop(place, None)
            self._lessees.pop(place, None)
            partition.publisher.offer([place], self.now)

    def time(self, x: int, y: int) -> None:
        self.now += 1 + x % (2 * RESEND_MS)
        for spine in self.spines.values():
            spine.tick(self.now)
        for partition in self.partitions.values():
            if partition.is_up:
                partition.publisher.tick(self.now)

    def crash(self, x: int, y: int) -> None:
        """Undo what was not on disk, including leases, which no worker can have received."""
        partition = self.partitions[x % len(self.partitions)]
        if partition.is_up:
            partition.crash()
            for place in partition.enqueued - partition.queue.leased:
                self._lessees.pop(place, None)

    def restart(self, x: int, y: int) -> None:
        down = [partition for partition in self.partitions.values() if not partition.is_up]
        if down:
            down[x % len(down)].restart(self.now)

    def throttle(self, x: int, y: int) -> None:
        number = x % len(self.partitions)
        self.throttled[number] = "maintenance"
        self.spine.throttle(number, "maintenance", self.now)

    def unthrottle(self, x: int, y: int) -> None:
        if self.throttled:
            number = sorted(self.throttled)[x % len(self.throttled)]
            del self.throttled[number]
            self.spine.unthrottle(number, self.now)

    def grow(self, x: int, y: int) -> None:
        number = len(self.partitions)
        if number < PARTITIONS_MAX:
            self.partitions[number] = SimPartition(number, self.publisher_class, self.judge_lease)
            self.spine.add(number, self.now)

    def rebound(self, x: int, y: int) -> None:
        """Set another K, of a few, while everything runs."""
        self.k = BOUNDS[x % len(BOUNDS)]
        if y % 2:
            self.spine.set_bound(self.k, self.now)

    def new_spine(self, x: int, y: int) -> None:
        """Start a new spine, perhaps with another K; the old one may continue without knowing."""
        epoch = len(self.spines) + 1
        self.spines[epoch] = self.spine_class(
            epoch,
            list(self.partitions),
            self.k,
            at=self.now,
            throttled=self.throttled,
            resend_ms=RESEND_MS,
            cancel_ms=CANCEL_MS,
        )

    # --- the end ---

    def heal(self) -> None:
        """Without further loss: everything must be delivered, acked, and every enqueue answered."""
        self.stalled.clear()
        self.is_lazy = False
        if self._ids % 2:
            self.network.clear()
        while self.throttled:
            self.unthrottle(0, 0)
        while not all(partition.is_up for partition in self.partitions.values()):
            self.restart(0, 0)
        rounds, done = 0, (-1, -1)
        while rounds < HEALING_ROUNDS:
            self.collect()
            if self.complaints or self._is_done():
                break
            before, done = done, (len(self.acked), len(self.spine.serving))
            rounds = rounds + 1 if done == before else 0
            for _ in range(HEALING_DELIVERIES):
                if not self.network:
                    break
                self.deliver(0, 0)
                self.collect()
            while self.in_hand:
                self.ack(0, 0)
            for number in self.partitions:
                self.expire(number, 0)
            if not self.spine.waiting:
                self.spine.pop(3, self.now)
            self.time(RESEND_MS, 0)
        if not self.complaints and not self._is_done():
            self.complain(f"not everything was handed out: {self._left_over()}; serving {sorted(self.spine.serving)}")

    def _is_done(self) -> bool:
        return not self._left_over() and len(self.spine.serving) == len(self.partitions)

    def _left_over(self) -> list[Place]:
        return sorted(
            place for partition in self.partitions.values() for place in partition.enqueued if place not in self.acked
        )


def random_steps(random: Random, count: int) -> list[Step]:
    """Steps of all kinds, in different proportions per run: one is mostly loss, the next crashes without throttling."""
    names = list(WEIGHTS)
    weights = [weight * (random.choice(MOODS) if name in FAULTS else 1) for name, weight in WEIGHTS.items()]
    chosen = random.choices(names, weights, k=count)
    return [(name, random.getrandbits(16), random.getrandbits(16)) for name in chosen]


def explore(
    seed: int,
    *,
    steps: int = 500,
    publisher_class: type[Publisher] = Publisher,
    spine_class: type[Spine] = Spine,
) -> list[str]:
    """Make one random run; return the oracle's complaints, of which there must be none."""
    random = Random(seed)
    k, partitions = random.choice(BOUNDS), random.randint(1, 4)
    world = World(k, partitions, publisher_class=publisher_class, spine_class=spine_class)
    world.ascent = random.choice((0, 0, -1, 1))
    world.is_lazy = random.random() < 0.4
    return world.play(random_steps(random, steps))
