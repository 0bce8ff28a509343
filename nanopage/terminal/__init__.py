"""What chat.py shows and reads. No engine logic."""
