"""How every slipstream process starts, watches its tasks, drains and ends."""
