"""Quantized layers, one file a kind. Each takes the places of plain ones once the weights are loaded."""
