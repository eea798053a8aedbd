"""HTTP: OpenAI and admin routes, metrics, tokenization, and the `gswapd` command line."""
