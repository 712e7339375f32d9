"""Native Triton parts for the native engine."""
