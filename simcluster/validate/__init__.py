"""Compare a card with a real run: how wrong is it, in what, and why."""
