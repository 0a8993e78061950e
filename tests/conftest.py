"""For all tests: examples of Hypothesis have no deadline, for a busy machine must not fail a right program, and Ctrl-C
stops: a shell lets what it starts in the background ignore it, and some tests send it."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("tiderl", deadline=None)
settings.load_profile("tiderl")
signal.signal(signal.SIGINT, signal.default_int_handler)
