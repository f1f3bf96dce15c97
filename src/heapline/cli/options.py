"""Options of commands, declared by the annotations of a function's parameters, and how their values are typed.

    limit: Annotated[int, "-n", "Maximum number of messages.", Meta(ge=1)] = 10
    wait: Annotated[Seconds | None, "Wait this long for the first message."] = None

A parameter's name is its flag. Text that begins with a dash adds a short flag, or replaces the flag; other text is the
help. `Panel`, `Value`, `Env`, msgspec's `Meta`, or a dict of arguments of typer.Option say the rest. Options that
several commands share are the parameters of a function, which builds one value from them: see `compose`.

A value that cannot be parsed raises BadParameter, so that the command line names its option. Whether a value makes
sense (a lease of a year, a delay of zero) is not decided here.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import typer
from msgspec import Meta
from typer.models import ParameterInfo

F = TypeVar("F", bound=Callable[..., Any])
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|w)")
_SIZE = re.compile(r"([0-9]+)\s*([kmg]i?b?|b)?", re.IGNORECASE)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30}
_LARGEST_FIRST = (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
_OFFSETS = re.compile(r"\d{1,18}[:=]\d{1,18}(,\d{1,18}[:=]\d{1,18})*\Z")
POSITION_HELP = (
    "earliest, latest, a time such as 2030-01-31T12:00:00Z, how long ago such as 2h, an offset such as 120, or offsets "
    "by partition such as 0:120,1:80"
)


# -- values ------------------------------------------------------------------------------------------------------------


def duration(text: str) -> float:
    """Return seconds.

    >>> duration("1h30m"), duration("250ms"), duration("45")
    (5400.0, 0.25, 45.0)
    """
    text = str(text).strip().lower()  # typer also passes defaults through here, which may be numbers
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    if not re.fullmatch(rf"({_DURATION.pattern})+", text):
        raise typer.BadParameter(
            f"{text!r} is not a duration; use a form such as 30s, 5m, 1h30m, 2d or 250ms (a bare number means seconds)"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def span(seconds: float) -> str:
    """Return a form that `duration` can read, to the millisecond and in at most two units.

    >>> span(5400), span(0.25), span(43200), span(0)
    ('1h30m', '250ms', '12h', '0s')
    """
    left, parts = round(seconds * 1000), []
    for unit, ms in _LARGEST_FIRST:
        if left >= ms and unit != "w":
            parts.append(f"{left // ms}{unit}")
            left %= ms
    return "".join(parts[:2]) or "0s"


def nbytes(text: str) -> int:
    """
    >>> nbytes("64MiB"), nbytes("512k"), nbytes("4096")
    (67108864, 524288, 4096)
    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = (match[2] or "").lower() if match else ""
    if not match or unit in ("kb", "mb", "gb"):
        raise typer.BadParameter(f"{text!r} is not a size; use 4096, 64KiB, 16MiB or 1GiB (K, M and G mean the same)")
    return int(match[1]) << _SHIFTS[unit.rstrip("b").rstrip("i")]


def instant(text: str) -> datetime:
    """
    >>> instant("2030-01-31T12:00:00Z").isoformat()
    '2030-01-31T12:00:00+00:00'
    """
    try:
        parsed = datetime.fromisoformat(str(text).strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time; use a form such as 2030-01-31T12:00:00Z, or an offset such as +02:00 instead of Z"
        ) from None
    if parsed.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no time zone; add Z for UTC, or an offset such as +02:00")
    return parsed


def past(text: str) -> datetime:
    """Parse a time, or a duration that means how long ago."""
    try:
        return datetime.now(UTC) - timedelta(seconds=duration(text))
    except typer.BadParameter:
        pass
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is too long ago") from None
    try:
        return instant(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}; or how long ago, such as 90m or 2d") from None


def position(text: Any) -> Any:
    """Parse a position in the stream of a topic: a name, an offset, offsets by partition, or a time.

    >>> position("latest"), position("120"), position("0:120,3:7")
    ('latest', 120, {0: 120, 3: 7})
    """
    text = str(text).strip()
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if _OFFSETS.match(text):
        pairs = (re.split("[:=]", part) for part in text.split(","))
        return {int(partition): int(offset) for partition, offset in pairs}
    try:
        return past(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is not a position in a stream; use {POSITION_HELP}") from None


def pair(text: str) -> tuple[str, str]:
    """
    >>> pair("trace=ab=c")
    ('trace', 'ab=c')
    """
    name, equals, value = str(text).partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not a pair; use NAME=VALUE")
    return name, value


# -- declarations ------------------------------------------------------------------------------------------------------


class Panel(str):
    """The heading under which --help lists an option."""


class Env(str):
    """The environment variable that sets an option."""


class Value(NamedTuple):
    """The type of an option: its name in --help, its parser, and how defaults are written."""

    metavar: str
    parser: Callable[[str], Any] | None = None
    show: Callable[[Any], str] | None = None


Seconds = Annotated[float, Value("DURATION", duration, span)]
Size = Annotated[int, Value("SIZE", nbytes)]
Time = Annotated[datetime, Value("TIME", instant)]  # such as 2030-01-31T12:00:00Z
Past = Annotated[datetime, Value("TIME", past)]  # a time, or how long ago
Position = Annotated[Any, Value("POSITION", position)]
Directory = Annotated[Path, Value("DIR")]
File = Annotated[Path, Value("FILE")]
Sql = Annotated[str, Value("SQL")]
Pair = Annotated[str, Value("NAME=VALUE")]
TopicName = Annotated[str, Value("TOPIC")]

JsonOption = Annotated[bool, "--json", "Print JSON lines for programs instead of tables."]
YesOption = Annotated[bool, "-y", "Do not ask for confirmation."]


def declare(function: F) -> F:
    """Replace the annotations of a function by those that typer reads."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return _sign(function, [_typer_parameter(parameter) for parameter in parameters])


def with_signature(build: F, options: Mapping[str, tuple[Any, Any]]) -> F:
    """Give a function that takes **options these options: name -> annotation and default."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return _sign(build, [inspect.Parameter(n, keyword, default=d, annotation=a) for n, (a, d) in options.items()])


def options_of(part: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(part, eval_str=True).parameters.values())


def compose(
    command: Callable[..., Any],
    run: Callable[..., None],
    parts: Mapping[str, Callable[..., Any]],
    hidden: Iterable[str] = (),
    example: str | None = None,
) -> Callable[..., None]:
    """Return a command with the name, the help and the options of `command`, and those of each part.

    Each part is called with its options, and `run` gets the values that they return, by their names, and the other
    options. Parameters of `command` that are `hidden` are not options. `example` is shown in the help.
    """
    shared = {name: options_of(part) for name, part in parts.items()}
    own = [option for option in options_of(command) if option.name not in (*hidden, *parts)]

    def call(**given: Any) -> None:
        built = {name: part(**{o.name: given.pop(o.name) for o in shared[name]}) for name, part in parts.items()}
        run(**given, **built)

    functools.update_wrapper(call, command)
    del call.__wrapped__  # type: ignore[attr-defined]
    if example is not None:
        call.__doc__ = with_example(command.__doc__ or "", example)
    options = [*own, *(option for part in shared.values() for option in part)]
    return _sign(call, [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options])


def paragraphs(help: str) -> str:
    """Join the lines of each paragraph, so that --help wraps them. A line after a colon stays on its own."""
    return re.sub(r"(?<![:\n])\n(?!\n)", " ", inspect.cleandoc(help))


def with_example(help: str, arguments: str) -> str:
    """Insert an example after the first paragraph of a help text."""
    first, _, rest = inspect.cleandoc(help).partition("\n\n")
    return f"{first}\n\nExample:  [cyan]heapline {arguments}[/cyan]\n\n{rest}".rstrip()


def takes(**parts: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the value that each part builds, and so the options of the part."""
    return lambda command: compose(command, command, parts)


def _sign(function: F, parameters: list[inspect.Parameter]) -> F:
    function.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _typer_parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    kind, metadata = _flatten(parameter.annotation)
    if not metadata or any(isinstance(item, ParameterInfo) for item in metadata):
        return parameter
    flags: list[str] = []
    more: dict[str, Any] = {}
    default = parameter.default
    for item in metadata:
        match item:
            case Panel():
                more["rich_help_panel"] = str(item)
            case Env():
                more["envvar"] = str(item)
            case Meta():
                more |= {"min": item.ge, "max": item.le}
            case Value(metavar, parser, show):
                more |= {"metavar": metavar, "parser": parser}
                default = show(default) if show is not None and isinstance(default, int | float) else default
            case Mapping():
                more |= item
            case str() if item.startswith("-"):
                flags += item.split()
            case _:
                more["help"] = item
    if not any(flag.startswith("--") for flag in flags):
        flags.insert(0, "--" + parameter.name.replace("_", "-"))
    return parameter.replace(annotation=Annotated[kind, typer.Option(*flags, **more)], default=default)


def _flatten(annotation: Any) -> tuple[Any, list[Any]]:
    """Return a type without Annotated, and all metadata in it.

    >>> _flatten(Annotated[Annotated[int, 1] | None, 2])
    (int | None, [1, 2])
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, inner = _flatten(arguments[0])
        return kind, [*inner, *arguments[1:]]
    if origin not in (list, Union, types.UnionType):
        return annotation, []
    kinds, metadata = zip(*map(_flatten, arguments), strict=True)
    kind = list[kinds[0]] if origin is list else functools.reduce(operator.or_, kinds)  # type: ignore[valid-type]
    return kind, [item for part in metadata for item in part]
