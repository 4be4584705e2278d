"""A client that sends a world's requests to an OpenAI-compatible server and times the answers."""
