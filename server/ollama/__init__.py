"""Ollama's API, for clients that speak it: chat, generate, embed, and what there is."""
