"""Rank hosts: engine and trainer cores behind the async ports, in this process or in one each."""
