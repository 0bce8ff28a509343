"""Talk to a model in the terminal: `nanopage chat`, from a checkout.

python chat.py                                  a conversation; Ctrl-C stops a reply, Ctrl-D leaves
python chat.py What is a KV cache?              one answer on stdout, everything else on stderr
python chat.py -p "Summarize this" < notes.txt  what is piped in is added to the prompt
python chat.py --url http://host:8000/v1        a model of a server of OpenAI's API
"""

if __name__ == "__main__":
    import os
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # during the imports, leave without a traceback
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(130))

import typer

from nanopage.terminal.chat import chat
from nanopage.terminal.program import run

app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command()(chat)

if __name__ == "__main__":
    raise SystemExit(run(app))
