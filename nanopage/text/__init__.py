"""Text to token ids and back, and conversations to text."""
