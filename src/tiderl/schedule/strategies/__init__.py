"""One short file per published schedule."""
