"""Options of commands, declared by the annotations of a function's parameters.

    limit: Annotated[int, "-n", "Maximum number of messages.", Meta(ge=1)] = 10
    wait: Annotated[Seconds | None, "Wait this long for the first message."] = None

A parameter's name is its flag. Text that begins with a dash adds a short flag, or replaces the flag; other text is the
help. `Panel`, `Value`, `Env`, msgspec's `Meta`, or a dict of arguments of typer.Option say the rest. Options that
several commands share are the parameters of a function, which builds one value from them: see `compose`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import typer
from msgspec import Meta
from typer.models import ParameterInfo

from heapline.cli.units import duration, instant, nbytes, past, position, span

F = TypeVar("F", bound=Callable[..., Any])


class Panel(str):
    """The heading under which --help lists an option."""


class Env(str):
    """The environment variable that sets an option."""


class Value(NamedTuple):
    """How the value of an option is called in --help, parsed, and written as a default."""

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
) -> Callable[..., None]:
    """Return a command with the name, the help and the options of `command`, and those of each part.

    Each part is called with its options, and `run` gets the values that they return, by their names, and the other
    options. Parameters of `command` that are `hidden` are not options.
    """
    shared = {name: options_of(part) for name, part in parts.items()}
    own = [option for option in options_of(command) if option.name not in (*hidden, *parts)]

    def call(**given: Any) -> None:
        built = {name: part(**{o.name: given.pop(o.name) for o in shared[name]}) for name, part in parts.items()}
        run(**given, **built)

    functools.update_wrapper(call, command)
    del call.__wrapped__  # type: ignore[attr-defined]
    options = [*own, *(option for part in shared.values() for option in part)]
    return _sign(call, [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options])


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
