"""Quantizers of bitsandbytes."""
