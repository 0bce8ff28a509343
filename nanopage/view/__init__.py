"""Shows what the engine does and why."""
