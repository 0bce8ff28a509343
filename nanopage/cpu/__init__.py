"""Code compiled for CPUs."""
