"""hypothesis profiles: dev on a desk, ci where CI is set, nightly by HYPOTHESIS_PROFILE."""

import os

from hypothesis import HealthCheck, settings

for name, examples in (("dev", 50), ("ci", 300), ("nightly", 5_000)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,  # the machine may be busy
        derandomize=name == "ci",
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
