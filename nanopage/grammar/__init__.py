"""Grammars of structured output: JSON schemas as llguidance reads them (schema.py), and matchers (matcher.py)."""
