"""`nanopage chat` and `nanopage transcribe`, and the terminal input and output of programs. No engine logic."""
