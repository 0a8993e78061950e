"""The journal, payloads, event segments and the lock of a run directory, on disk or in memory."""
