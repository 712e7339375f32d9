"""Decoders that gain more than one token per forward pass."""
