"""What comes in through a run's doors and means it ill: programs, strangers, members gone bad, poisoned files."""
