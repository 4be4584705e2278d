"""`python -m simcluster`."""

from simcluster.entry import main

if __name__ == "__main__":
    main()
