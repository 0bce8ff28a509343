"""Mixtures of experts: the layer, which experts compute a token, and their kernel for a GPU."""
