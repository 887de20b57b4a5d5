"""The experiments, one in each file."""
