"""The definition of every op, in torch: complete, out of place, differentiable, on any device that torch drives."""
