"""Prompts in one process, outputs in another."""
