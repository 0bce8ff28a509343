"""Quantized layers, one file for each kind. They replace plain layers once the weights are loaded."""
