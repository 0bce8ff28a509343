"""Weights of few bits: formats, layers and products."""
