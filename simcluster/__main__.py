"""`python -m simcluster`."""

from simcluster.cli import main

main()
