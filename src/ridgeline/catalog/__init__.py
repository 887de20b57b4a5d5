"""Look up published machines, links and models by name. Code that computes a cost belongs in cost/."""
