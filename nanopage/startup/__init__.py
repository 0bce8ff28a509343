"""Builds a worker from its options, in this process or in one of its own."""
