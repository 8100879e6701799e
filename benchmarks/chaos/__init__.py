"""Faults at random instants against a whole stack of real processes: `python -m benchmarks.chaos`."""
