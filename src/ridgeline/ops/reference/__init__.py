"""The definition of every op in torch: complete, pure and differentiable, on any device of torch."""
