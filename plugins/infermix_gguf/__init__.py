"""Blocks of GGUF files, kept as they are."""
