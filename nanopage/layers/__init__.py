"""Neural-network layers. Activations are flat, [T, hidden_size]: the T tokens of all sequences."""
