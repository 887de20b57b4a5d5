"""Corpora and their manifests, vocabularies, token shards and batches. No model belongs here."""
