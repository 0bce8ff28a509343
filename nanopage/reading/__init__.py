"""Reads config.json as data."""
