"""`nanopage chat`, and the terminal input and output of programs. No engine logic."""
