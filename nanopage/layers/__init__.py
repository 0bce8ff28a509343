"""Neural-network layers, one a file. Activations are flat: [T, hidden_size], T tokens of all sequences in a row."""
