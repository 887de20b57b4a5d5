"""Open checkpoints: configs, weights, tokenizers and chat templates. Nothing here computes with a weight."""
