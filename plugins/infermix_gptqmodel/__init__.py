"""GPTQ and AWQ by the library gptqmodel, in an environment of its own."""
