"""Hypothesis runs a fixed, small sample by default; ``make torture`` runs a large random one."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("torture", max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
