"""Things that a request can be sent to."""
