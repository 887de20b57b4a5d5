"""Kernels of torch and of the libraries beside it, as candidates that a user selects by name."""
