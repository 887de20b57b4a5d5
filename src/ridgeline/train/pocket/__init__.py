"""Train the built-in pair of models again from its recipe: data, training, pruning, evaluation, model cards."""
