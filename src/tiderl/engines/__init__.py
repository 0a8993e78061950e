"""Inference engines behind `EngineCore`. Each module has `build(settings)`; importing this package imports no torch."""
