"""Who speaks for a member of a group: the subscription that came last under its name.

Kept in memory only. After the log was opened again the first session that comes is the current one. One that was
replaced is remembered for a while, so that it is told so and does not take the name back.
"""

from __future__ import annotations

from collections import deque

from heapline.errors import GroupNotFound, MemberReplaced

_REPLACED_MAX = 64  # sessions of one name that are remembered
_ENDED_MAX = 4096  # sessions that are remembered beyond their group


class Sessions:
    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._current: dict[tuple[str, str], str] = {}
        self._replaced: dict[tuple[str, str], deque[str]] = {}
        self._ended: dict[tuple[str, str], None] = {}  # (group, session), oldest first

    def enter(self, group: str, member: str, session: str) -> bool:
        """True: it takes the name over from another."""
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
        """Whether it still speaks for the member: it has not left, and nobody took its name."""
        return self._current.get((group, member)) == session

    def check(self, group: str, member: str, session: str, is_member: bool) -> None:
        """For calls that do not make a session; of one who is no member none is remembered."""
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
        """A subscription must not make its group again that somebody deleted."""
        if (group, session) in self._ended:
            raise GroupNotFound(self._topic, group)

    def leave(self, group: str, member: str) -> None:
        """It is gone; who comes under its name next is the first."""
        self._current.pop((group, member), None)
        self._replaced.pop((group, member), None)

    def end_group(self, group: str) -> None:
        for name in [name for name in self._current if name[0] == group]:
            self._ended[group, self._current.pop(name)] = None
        for name in [name for name in self._replaced if name[0] == group]:
            del self._replaced[name]
        while len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]
