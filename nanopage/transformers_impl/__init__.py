"""Decoders that nanopage has no family for: transformers' own modules with paged attention."""
