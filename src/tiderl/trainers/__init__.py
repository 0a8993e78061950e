"""Trainers behind `TrainerCore`: losses, advantages, packing, checkpoints, exported weights.

Importing this package costs no torch; `torch_trainer.build` imports it. Knows nothing of engines, schedules or runs.
"""
