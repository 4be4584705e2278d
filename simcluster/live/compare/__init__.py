"""The same policy on the same requests, in simulation and in front of live servers, side by side."""
