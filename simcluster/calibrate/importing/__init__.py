"""Steps from elsewhere: vLLM's iteration log, kernel tables, layer profiles."""
