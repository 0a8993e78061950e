"""For all tests: examples of Hypothesis have no deadline, for a busy machine must not fail a right program."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tiderl", deadline=None)
settings.load_profile("tiderl")
