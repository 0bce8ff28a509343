"""An engine sleeps, wakes up, and gets other weights."""
