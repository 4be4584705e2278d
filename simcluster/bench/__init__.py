"""How fast the simulator is: the figures of `simcluster bench`, measured in CPU time and instructions."""
