"""Profiler: torch's profiler, with the configuration and the files of vLLM's `LLM.start_profile`."""

import logging
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("nanopage")

DIRECTORY = "nanopage_profile"


class Profiler:
    """Records what a thread computes, and the GPU if there is one, between `start` and `stop`.

    Args:
        config: {"profiler": "torch", "torch_profiler_dir": directory}, as in vLLM. None, or without a directory:
            nanopage_profile in the current directory.

    Raises: TypeError, ValueError: a config of another form.
    """

    def __init__(self, config: dict | None = None):
        config = {} if config is None else config
        if not isinstance(config, dict):
            raise TypeError(f"profiler_config must be a dict, not {config!r}")
        if unknown := config.keys() - {"profiler", "torch_profiler_dir"}:
            names = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"profiler_config has fields that are not supported: {names}")
        if config.get("profiler", "torch") != "torch":
            raise ValueError(f"profiler_config: profiler {config['profiler']!r} is not supported, only 'torch'")
        directory = config.get("torch_profiler_dir", DIRECTORY)
        if not isinstance(directory, str | Path):
            raise TypeError(f"profiler_config: torch_profiler_dir must be a path, not {directory!r}")
        self._directory = Path(directory)
        self._running: Any = None  # a torch.profiler.profile

    def start(self, prefix: str | None = None) -> None:
        """Start recording the calling thread.

        Args:
            prefix: how the name of the file begins; None: "nanopage".

        Raises: ValueError if the prefix is not part of a file name; RuntimeError if a recording is running.
        """
        from torch.profiler import profile

        if prefix is not None and Path(prefix).name != prefix:
            raise ValueError(f"profile_prefix must be the beginning of a file's name, not {prefix!r}")
        if self._running is not None:
            raise RuntimeError("the profiler has been started already: call stop_profile()")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = self._directory / f"{prefix or 'nanopage'}-{time.time_ns()}.json.gz"
        self._running = profile()
        self._running.start()

    def stop(self) -> None:
        """Stop recording, write a Chrome trace (ui.perfetto.dev) to a new file, and log its name.

        Raises: RuntimeError if no recording is running; OSError if the file cannot be written.
        """
        if self._running is None:
            raise RuntimeError("the profiler has not been started: call start_profile()")
        profiler, self._running = self._running, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._file))
        if not self._file.exists():  # torch only logs that it failed
            raise OSError(f"the profiler could not write {self._file}")
        logger.info(f"profile written to {self._file}")
