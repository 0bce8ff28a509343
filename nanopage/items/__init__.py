"""Inputs that are no tokens."""
