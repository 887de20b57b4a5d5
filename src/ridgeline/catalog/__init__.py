"""Look up published machines, links and models by name. Nothing here computes a cost."""
