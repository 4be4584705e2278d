"""The decision log of a live router, and its replay."""
