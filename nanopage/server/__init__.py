"""The OpenAI-compatible HTTP server: `nanopage serve`.

Read `app.py` first: it has the routes. `chat.py`, `completions.py` and `responses.py` turn a body (`protocol.py`) into
engine requests and their outputs into a reply, or into chunks that `streaming.py` sends. `generation.py` runs the
requests of one call. Every call passes through `middleware.py`: keys, limits, ids. `serve.py` is the program.
"""
