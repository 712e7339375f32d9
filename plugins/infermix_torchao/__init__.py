"""Quantizers of torchao."""
