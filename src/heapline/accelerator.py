"""The accelerator: C versions of the few functions in which a broker spends most of its CPU time.

The functions are in `_accelerator.c`, which a build compiles if it finds a C compiler (`hatch_build.py`). Each has a
twin in Python with the same name, results and refusals. Which of the two runs is decided here, once, when the twin is
defined:

    @accelerated
    def lay_out(rows, smalls, payloads): ...

The environment variable HEAPLINE_ACCELERATOR turns the C versions off: any value but `on` does. It is read here, not
in `cli/`, because it must be known when modules are imported, and because it changes no result.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, TypeVar

#: Raised whenever a signature or a result changes. A binary of another version, left by an older checkout, is not used.
VERSION = 1
VARIABLE = "HEAPLINE_ACCELERATOR"

T = TypeVar("T")


def load(setting: str | None) -> tuple[Any, str]:
    """Return the C module, or None, and the reason."""
    if setting not in (None, "", "on"):
        return None, f"{VARIABLE}={setting}"
    try:
        module: Any = importlib.import_module("heapline._accelerator")
    except ModuleNotFoundError:
        return None, "not built: the installation found no C compiler or no Python headers"
    except ImportError as error:
        return None, f"cannot be loaded: {error}"
    if module.VERSION != VERSION:
        return None, "built from another version of Heapline; install this one again"
    return module, f"checksums: {module.CHECKSUMS}"


#: The C module or None, and why.
native, reason = load(os.environ.get(VARIABLE))
#: The Python version of each function or class, by name.
twins: dict[str, Any] = {}


def accelerated(twin: T) -> T:
    """Return the C version of a function or class; if the accelerator is off, return it unchanged."""
    name: str = getattr(twin, "__name__")  # noqa: B009
    twins[name] = twin
    return twin if native is None else getattr(native, name)


def use(on: bool) -> None:
    """Make every module use the C versions or their twins from now on. For tests."""
    if on and native is None:
        raise RuntimeError(f"the accelerator is off ({reason})")
    for module in [m for m in list(sys.modules.values()) if m is not native]:
        for name, twin in twins.items():
            if getattr(module, "__dict__", {}).get(name) in (twin, getattr(native, name, twin)):
                setattr(module, name, getattr(native, name) if on else twin)


def description() -> str:
    return f"{'off' if native is None else 'on'} ({reason})"
