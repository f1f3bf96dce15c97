"""Encode a task's arguments as JSON, one field per parameter: `{"order": {…}, "copy": true}`.

Encoded where a task is enqueued, and decoded by the function's annotations where it runs. An enqueue decodes what it
has encoded, so wrong arguments raise TypeError in the caller instead of becoming dead letters. Arguments that are
omitted are not encoded, so the worker's defaults apply.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec

from heapline.contract.payload_codec import build_decoder, without_values, write_foreign

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Undecodable(ValueError):
    """The message is not a call of its task."""


class Arguments:
    """Encodes and decodes the calls of one function."""

    def __init__(self, name: str, function: Callable[..., Any], reserved: frozenset[str] = frozenset()) -> None:
        self.name = name
        self._function = function
        self._signature = inspect.signature(function)
        for parameter in self._signature.parameters.values():
            if parameter.kind in _VARIADIC:
                raise TypeError(f"task {name!r} has {parameter}; every argument of a task must have a name")
            if parameter.name in reserved:
                raise TypeError(
                    f"task {name!r} has a parameter {parameter.name!r}, which is an option of enqueue; rename it"
                )
        self._positional = [
            p.name for p in self._signature.parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY
        ]
        kinds = {p.kind for p in self._signature.parameters.values()}
        self._names = list(self._signature.parameters) if kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD} else None
        self._encoder = msgspec.json.Encoder(enc_hook=write_foreign)

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[Any]:
        """Created on first use, because an annotation may name a class that is defined later in its module."""
        try:
            hints = typing.get_type_hints(self._function, include_extras=True)
        except NameError as error:
            raise TypeError(
                f"task {self.name!r} has an annotation that cannot be resolved ({error}); the worker decodes arguments "
                "by their annotations, so import the names at run time too"
            ) from None
        fields: list[Any] = []
        for p in self._signature.parameters.values():
            kind = hints.get(p.name, Any)
            if p.default is inspect.Parameter.empty:
                fields.append((p.name, kind))
            else:
                fields.append((p.name, kind, msgspec.field(default_factory=_constant(p.default))))
        try:
            shape = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
            return build_decoder(msgspec.json.Decoder, shape)  # type: ignore[no-any-return]
        except TypeError as error:
            raise TypeError(f"task {self.name!r} has an annotation that JSON cannot be decoded to: {error}") from None

    def check(self) -> None:
        """Raise TypeError now instead of with the first message."""
        _ = self._decoder

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not kwargs and self._names is not None and len(args) == len(self._names):
            return dict(zip(self._names, args, strict=True))  # the same result in a tenth of the time
        try:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"task {self.name}{self._signature}: {error}") from None

    def encode(self, arguments: dict[str, Any]) -> bytes:
        decoder = self._decoder
        try:
            payload = self._encoder.encode(arguments)
            decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise TypeError(
                f"task {self.name}{self._signature}: the worker would reject these arguments: {without_values(error)}"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"task {self.name}{self._signature}: {error}") from None
        return payload

    def decode(self, payload: bytes) -> dict[str, Any]:
        try:
            found = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Undecodable(f"the payload is not a call of task {self.name!r}: {without_values(error)}") from None
        return {name: getattr(found, name) for name in found.__struct_fields__}

    def call(self, arguments: dict[str, Any]) -> Any:
        if not self._positional:
            return self._function(**arguments)
        first = [arguments[name] for name in self._positional]
        return self._function(*first, **{k: v for k, v in arguments.items() if k not in self._positional})


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
