"""The OpenAI-compatible API: what is understood, and how answers are written."""
