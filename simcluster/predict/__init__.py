"""What is believed about a request before it is served: answer length, quality, cost."""
