"""`slipstream up`: every role on one host, watched, restarted and ended together."""
