"""The channel between processes: framing, request ids, deadlines. Never pickle. Knows only `tiderl.data`."""
