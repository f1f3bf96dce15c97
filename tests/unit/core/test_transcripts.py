"""Readable scenarios: testdata/*.txt, each a list of commands with their effects.

A command is above `----`, its effects below, and an empty line ends them; lines that begin with # are comments.
Messages have one-letter names. To write the effects again after an intended change:

    python -m tests.unit.core.test_transcripts
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from heapline.contract.message import Outgoing, from_ms
from heapline.core.events import KIND_NAMES, Extended, decode_events
from heapline.core.leases import DEADLINE
from heapline.core.record import attempts_of
from tests.unit.core.partition_rig import Rig
from tests.unit.core.rig_journal import START

FOLDER = Path(__file__).parent / "testdata"
TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))
_SECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def ms(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m|h|d)", text).groups()  # type: ignore[union-attr]
    return int(number) * _SECONDS[unit]


class Story:
    """Runs commands and describes what happened to each message."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.ids: dict[str, int] = {}

    def tell(self, command: str) -> list[str]:
        verb, *words = command.split()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        reported = len(self.rig.log)
        before = self.states()
        lost = getattr(self, f"do_{verb}")(names, **options)
        effects = self.effects(reported, before)
        if isinstance(lost, list):
            effects += [f"{self.name(id)}: lease lost" for id in lost]
        self.rig.check(look=True)
        return effects

    def effects(self, reported: int, before: dict[str, str]) -> list[str]:
        """One line for each message in each event, in order."""
        lines = []
        for entry in self.rig.log[reported:]:
            (event,) = decode_events(b"\x91" + entry.data, "transcript")
            ids = entry.rows["id"].tolist() if entry.rows is not None else event.ids.tolist()  # type: ignore[union-attr]
            lines += [f"{self.name(id)}: {KIND_NAMES[type(event)]}{self.detail(event, id)}" for id in ids]
            lines += [f"{self.name(id)}: its ttl ended" for id in getattr(event, "leased", ())]
        return lines + [f"{name} is {state}" for name, state in self.states().items() if state != before.get(name)]

    def detail(self, event: Any, id: int) -> str:
        lease = self.rig.p.entries.leases.by_id.get(id)
        if isinstance(event, Extended) and lease is not None:
            return f" to {self.at(lease[DEADLINE])}"
        if lease is not None:
            return f", attempt {attempts_of(lease[1])}, until {self.at(lease[DEADLINE])}"
        reason = getattr(event, "reason", None)
        return f" ({reason})" if reason else ""

    def states(self) -> dict[str, str]:
        states = {}
        for name, id in sorted(self.ids.items()):
            found = self.rig.p.entries.find(id)
            due = f" until {self.at(found.due)}" if found is not None and found.due else ""
            states[name] = self.rig.state_of(id) + due
        return states

    def at(self, moment: int) -> str:
        return f"{(moment - START) / 1000:g} s"

    def name(self, id: int) -> str:
        return next(name for name, known in self.ids.items() if known == id)

    def which(self, names: list[str]) -> list[int]:
        return [self.ids[name] for name in names]

    def do_enqueue(self, names: list[str], **options: str) -> None:
        facts: dict[str, Any] = {}
        for option, value in options.items():
            if option in ("delay", "ttl"):
                facts[option] = ms(value) / 1000
            elif option == "deliver_in":
                facts["deliver_at"] = from_ms(self.rig.now.wall + ms(value))
            else:
                facts[option] = int(value)
        ids = self.rig.enqueue(*(Outgoing(b"", **facts) for _ in names))
        self.ids.update(zip(names, ids, strict=True))

    def do_pop(self, names: list[str], visibility: str = "30s") -> None:
        self.rig.pop(int(names[0]) if names else 1, visibility=ms(visibility))

    def do_wait(self, names: list[str]) -> None:
        self.rig.advance(ms(names[0]))
        self.rig.tick()

    def do_ack(self, names: list[str]) -> list[int]:
        return self.rig.ack(*self.which(names), tokens=self.last_tokens(names))

    def do_nack(self, names: list[str], backoff: str | None = None, reason: str | None = None) -> list[int]:
        wait = None if backoff is None else ms(backoff)
        return self.rig.nack(*self.which(names), tokens=self.last_tokens(names), backoff=wait, reason=reason)

    def do_release(self, names: list[str]) -> list[int]:
        return self.rig.release(*self.which(names), tokens=self.last_tokens(names))

    def do_extend(self, names: list[str], by: str) -> list[int]:
        return self.rig.extend(*self.which(names), tokens=self.last_tokens(names), by=ms(by))

    def last_tokens(self, names: list[str]) -> list[int]:
        """The message that the worker popped last."""
        last = dict(self.rig.old_tokens)
        return [last[self.ids[name]] for name in names]

    def do_reschedule(self, names: list[str], delay: str | None = None, priority: str | None = None) -> None:
        due = None if delay is None else self.rig.now.steady + ms(delay)
        self.rig.reschedule(self.ids[names[0]], due=due, priority=None if priority is None else int(priority))

    def do_cancel(self, names: list[str]) -> None:
        self.rig.cancel(self.ids[names[0]])

    def do_replay(self, names: list[str]) -> None:
        self.rig.replay_dead(self.which(names))

    def do_restart(self, names: list[str]) -> None:
        self.rig.restart(self.rig.replayed())


def retold(text: str) -> str:
    """Return the transcript with its current effects."""
    story, lines = Story(), []
    for block in text.strip("\n").split("\n\n"):
        above = block.splitlines()
        if "----" not in above:
            lines.append(block)  # only comments
            continue
        above = above[: above.index("----")]
        effects = [effect for line in above if not line.startswith("#") for effect in story.tell(line)]
        lines.append("\n".join([*above, "----", *(effects or ["nothing"])]))
    return "\n\n".join(lines) + "\n"


def test_transcripts_exist() -> None:
    assert len(TRANSCRIPTS) >= 3


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript_matches_the_partition(path: Path) -> None:
    text = path.read_text()
    assert retold(text) == text


if __name__ == "__main__":
    for transcript in TRANSCRIPTS:
        transcript.write_text(retold(transcript.read_text()))
