import signal

from hypothesis import settings

# Speed is judged by benchmarks, never by one wall time on a busy machine.
settings.register_profile("simcluster", deadline=None)
settings.load_profile("simcluster")

# Shells start what runs in the background with Ctrl-C ignored, which children inherit; tests interrupt theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
