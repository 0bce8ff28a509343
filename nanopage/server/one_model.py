"""`nanopage serve` with one model, behind a server with several: `python -m nanopage.server.one_model NAME`.

model_process.py starts it. The first line of its stdin has the options. Its stdin closes when the server in front of it
ends, in whatever way, and this process then ends as well.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time

logger = logging.getLogger("nanopage")

SECONDS_TO_END = 10.0  # after SIGTERM


def main() -> int:
    """Serve until a signal. Returns: the process's exit code."""
    options = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        from nanopage.server.serve import run  # imports torch, which takes seconds

        return run(argparse.Namespace(**options))
    except Exception as error:
        logger.exception(str(error))
        return 1


def _end_with_stdin() -> None:
    os.read(0, 1)  # nothing more is ever written
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
