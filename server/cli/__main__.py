"""`python -m server.cli` is `gswapd`."""

from server.cli import main

if __name__ == "__main__":
    main()
