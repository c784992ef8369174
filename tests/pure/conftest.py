"""Hypothesis draws the same examples in every run, and has as much time as the machine takes (as it does where CI is set)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("same", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
