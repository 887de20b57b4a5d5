"""Corpora and their manifests, vocabularies, token shards and batches. Code that needs a model belongs one level up."""
