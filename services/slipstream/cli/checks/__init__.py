"""What a config asks of this machine, checked before anything is started; `listing` is the one list of it."""
