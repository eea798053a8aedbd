"""Bytes: the image format, its packer and store, frame pools, readers and the pager."""
