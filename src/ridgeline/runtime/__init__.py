"""Run a model: load it, hold its pages, lay out a step, compute logits. Which sequences run is not decided here."""
