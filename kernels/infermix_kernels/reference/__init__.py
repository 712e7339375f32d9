"""The plain-PyTorch meaning of every kernel."""
