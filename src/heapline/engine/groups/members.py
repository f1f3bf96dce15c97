"""Members of a group: which session owns each member's name, and which partitions each member gets.

The most recent subscriber owns a name. That is kept in memory only: after the log is reopened, the first session under
a name is the current one. A replaced session is remembered for a while, so that it gets an error and does not take the
name back. Partitions are assigned with the strategies of `heapline.assign`, all with the same weight. They stay with
their member as far as an even spread allows: a join moves about one share, and a leave moves only what the leaver had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from heapline.contract.errors import GroupNotFound, MemberReplaced

_REPLACED_MAX = 64  # replaced sessions remembered per name
_ENDED_MAX = 4096  # sessions remembered after their group was deleted


class Sessions:
    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._current: dict[tuple[str, str], str] = {}
        self._replaced: dict[tuple[str, str], deque[str]] = {}
        self._ended: dict[tuple[str, str], None] = {}  # (group, session), oldest first

    def enter(self, group: str, member: str, session: str) -> bool:
        """Register a session. Return True if it replaces another session under the same name."""
        name = (group, member)
        current = self._current.get(name)
        if current == session:
            return False
        self._refuse_replaced(name, session)
        self._current[name] = session
        if current is None:
            return False
        self._replaced.setdefault(name, deque(maxlen=_REPLACED_MAX)).append(current)
        return True

    def is_current(self, group: str, member: str, session: str) -> bool:
        """Return whether the session still owns the member's name: it has not left and was not replaced."""
        return self._current.get((group, member)) == session

    def check(self, group: str, member: str, session: str, is_member: bool) -> None:
        """Check the session of a call that does not create one. A session of a non-member is not remembered."""
        name = (group, member)
        current = self._current.get(name)
        if current is not None and current != session:
            raise MemberReplaced(self._topic, group, member)
        self._refuse_replaced(name, session)
        if is_member:
            self._current[name] = session

    def _refuse_replaced(self, name: tuple[str, str], session: str) -> None:
        if name in self._replaced and session in self._replaced[name]:
            raise MemberReplaced(self._topic, *name)

    def check_ended(self, group: str, session: str) -> None:
        """Raise GroupNotFound if the group was deleted, so that a subscription does not recreate it."""
        if (group, session) in self._ended:
            raise GroupNotFound(self._topic, group)

    def leave(self, group: str, member: str) -> None:
        """Forget the member. The next session under its name replaces no one."""
        self._current.pop((group, member), None)
        self._replaced.pop((group, member), None)

    def end_group(self, group: str) -> None:
        for name in [name for name in self._current if name[0] == group]:
            self._ended[group, self._current.pop(name)] = None
        for name in [name for name in self._replaced if name[0] == group]:
            del self._replaced[name]
        while len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]


def assign(
    members: Sequence[str], partitions: Sequence[int], shares: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Assign each partition to one of the members."""
    from heapline.assign import Partition, WeightedConsistentHashStrategy  # few brokers have groups with members

    known = {number: Partition((str(number),)) for number in partitions}
    before = {member: [known[p] for p in share if p in known] for member, share in shares.items()}
    after = WeightedConsistentHashStrategy().assign(members, list(known.values()), before)
    return {member: sorted(int(partition.keys[0]) for partition in share) for member, share in after.items()}
