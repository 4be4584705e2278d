"""Check the scheduler against decisions recorded from vLLM's own scheduler classes."""
