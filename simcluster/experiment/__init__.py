"""Run a scenario under one or several policies."""
