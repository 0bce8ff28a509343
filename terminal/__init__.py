"""What chat.py shows and reads: one file a trade. No engine logic."""
