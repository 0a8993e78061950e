"""Typed configuration: keys in `schema`, file in `load`, combinations in `check`, numbers for `auto` in `resolve`."""
