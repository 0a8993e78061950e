"""Virtual time: an event loop whose clock jumps, and ports that cost what the cost model says (architecture §6)."""
