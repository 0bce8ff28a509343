"""One file an engine: how its environment is made, how it is loaded, how it runs a batch of requests."""
