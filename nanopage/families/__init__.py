"""Model families beside those of models/, one file each, and made in the same way."""
