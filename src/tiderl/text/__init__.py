"""Renderers: text and tool calls to token ids and back (I8). Know only `tiderl.data`."""
