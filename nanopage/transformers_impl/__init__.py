"""Decoders that nanopage has no family for, by transformers' own modules with paged attention."""
