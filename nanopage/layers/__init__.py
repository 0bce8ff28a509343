"""Neural-network layers, one in each file. Activations are flat, [T, hidden_size]: the T tokens of all sequences."""
