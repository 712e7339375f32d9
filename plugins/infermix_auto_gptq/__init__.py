"""GPTQ by the library auto-gptq, in an environment of its own."""
