"""How every test runs: which Hypothesis profile is in force. Fixtures live beside the tests that use them.

"check" is the default: few examples, the same ones on every machine, so that a red run is red for everybody.
"soak" looks for new ones: `make soak`, or `pytest --hypothesis-profile=soak` on any test.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "check",
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,  # a busy machine is not a failed test
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak",
    max_examples=20_000,
    stateful_step_count=200,
    derandomize=False,
    deadline=None,
    print_blob=True,  # so that a failure found once can be replayed anywhere
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
)
settings.load_profile("check")
