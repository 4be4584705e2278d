"""Servers that behave like vLLM, on simulated engines in wall-clock time."""
