"""The half that decides: which sequences run, in which blocks, and what their tokens mean. No torch here."""
