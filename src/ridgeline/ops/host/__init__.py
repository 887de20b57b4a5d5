"""Every primitive in numpy, and numpy's memory: what the `cpu` device has where no kernel of ours serves an op."""
