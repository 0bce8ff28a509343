"""What a sequence keeps between steps."""
