"""Typed records over numpy arrays: trajectories, groups, micro-batches, versions, events, the error tree. Imports
nothing of ours."""
