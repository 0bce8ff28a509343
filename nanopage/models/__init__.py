"""Model families, one a file, each readable alone. `config.ARCHITECTURES` says which file an architecture is in."""
