"""The paper's figures on the simulated cluster, and what lies beyond them."""
