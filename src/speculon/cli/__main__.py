"""`python -m speculon.cli`."""

from speculon.cli import main

if __name__ == "__main__":
    main()
