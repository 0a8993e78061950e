"""The decisions, pure: a frozen view in, decisions out. No asyncio, no torch, no I/O, no clock, no global random."""
