"""The errors of assign have one base, and each also belongs to the branch that says what to do."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from heapline.assign import errors
from heapline.contract.errors import ConflictError, HeaplineError, RequestError, UnavailableError

LEAVES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.AssignError) and cls is not errors.AssignError
]
SAMPLES = {"str": "sample", "int": 7, "float": 2.5}


def test_error_tree_in_the_docstring_is_correct() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+)\s+(\w+):", errors.__doc__ or ""))
    branches = (RequestError, UnavailableError, ConflictError)
    assert drawn == {
        cls.__name__: next(branch.__name__ for branch in branches if issubclass(cls, branch)) for cls in LEAVES
    }


def test_four_specified_errors_exist() -> None:
    named = {"StableIDExhausted", "ConnectionLost", "AssignmentVersionMismatch", "ElectionFailed"}
    assert named <= {cls.__name__ for cls in LEAVES}
    assert issubclass(errors.AssignError, HeaplineError)
    assert issubclass(errors.StartupTimeout, TimeoutError)


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_error_carries_its_fields_and_can_be_pickled(cls: type[errors.AssignError]) -> None:
    parameters = inspect.signature(cls).parameters
    assert tuple(parameters) == cls.fields
    given = {name: SAMPLES[parameter.annotation] for name, parameter in parameters.items()}
    error = cls(**given)
    assert error.facts() == given
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.facts()) == (cls, str(error), given)
