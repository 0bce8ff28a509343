"""Tools: functions that a model may call. What they are (definitions.py), how models write calls (formats.py), how
calls are read while a reply streams (reply.py), grammars for calls (grammar.py), and Python functions (functions.py).
"""
