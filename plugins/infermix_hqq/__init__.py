"""The quantizer of hqq."""
