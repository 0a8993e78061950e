"""Environments: what people write, the registry, and the isolations that run them. Know `tiderl.data`, ports,
wire."""
