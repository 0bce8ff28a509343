"""`nanopage chat`, and what programs show and read. No engine logic."""
