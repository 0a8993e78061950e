"""The command line: parses, calls `tiderl.api`, prints. Decides nothing."""
