"""Requests over HTTP in wall-clock time: servers that behave like vLLM, and the router in front of servers."""
