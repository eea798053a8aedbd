"""`python -m server.cli` is `gswapd`."""

from server.cli import main

main()
