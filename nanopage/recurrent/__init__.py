"""Layers that keep a state of fixed size for each sequence in place of K and V."""
