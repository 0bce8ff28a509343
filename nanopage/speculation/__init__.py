"""Guessed tokens, checked in one step."""
