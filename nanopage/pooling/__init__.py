"""Embeddings, scores and classes of texts."""
