"""The engine that docs/build/ builds. `server.py` takes a text. `engine.py` checks it and lets it wait in
`scheduler.py`, which decides how many of its tokens the next step computes; `blocks.py` gives it blocks for them.
`cache.py` makes tensors of the step, `model.py` computes it, and `attention.py` reads K and V in the blocks.
`sampling.py` draws a token from the logits, which is appended. This repeats until the sequence ends."""
