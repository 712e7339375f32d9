"""AWQ by the library autoawq, in an environment of its own."""
