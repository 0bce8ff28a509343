"""Logits to tokens, for all rows of a batch at once."""
