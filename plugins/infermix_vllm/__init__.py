"""vLLM as a whole engine."""
