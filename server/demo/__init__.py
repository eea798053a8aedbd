"""`gswapd demo`: three real chat models answer from memory that holds two."""
