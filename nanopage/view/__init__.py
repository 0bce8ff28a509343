"""What the engine does and why, shown."""
