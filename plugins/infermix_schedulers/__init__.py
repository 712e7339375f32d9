"""Scheduling policies for the native engine."""
