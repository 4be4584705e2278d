"""Discrete-event simulator of a cluster of LLM serving instances."""

__version__ = "0.1.0"
