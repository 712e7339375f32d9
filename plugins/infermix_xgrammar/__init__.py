"""Constrained decoding through xgrammar."""
