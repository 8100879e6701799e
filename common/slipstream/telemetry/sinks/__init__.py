"""Steps, evaluations and samples to trackers: off by default, by step, failing soft.

`contract` says what a sink is, `feeds` gives each one a thread, `opening` finds those that the config names.
"""
