"""Quantization algorithms for the native engine."""
