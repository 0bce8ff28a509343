"""A model's files, read without trusting them."""
