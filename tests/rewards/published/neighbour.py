"""What lies beside a reward's file is importable by its name."""

THINK = r"^<think>.*?</think>.*$"
