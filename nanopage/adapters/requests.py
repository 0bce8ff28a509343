"""Adapters: the LoRA adapters that requests of an engine may name, each checked once (see adapters/files.py)."""

from pathlib import Path

from nanopage.adapters.files import read_adapter
from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.engine.sequence import Adapter
from nanopage.inputs import LoRARequest


class Adapters:
    """Checks the adapters of requests. Threads may share it."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig):
        self.config, self.model_config = config, model_config
        self._checked: dict[int, LoRARequest] = {}  # by lora_int_id

    def check(self, request: LoRARequest) -> Adapter:
        """The adapter of a request. Its files are read only the first time.

        Raises: ValueError naming what is wrong with it, also if there is no such file.
        """
        known = self._checked.get(request.lora_int_id)
        try:
            path = Path(request.lora_path).expanduser().absolute()
        except RuntimeError as error:  # "~name" without such a user
            raise ValueError(f"adapter {request.lora_name!r}: lora_path={request.lora_path!r}: {error}") from None
        if known is None:
            try:
                read_adapter(path, self.model_config, self.config.max_lora_rank)
            except (ValueError, OSError) as error:
                raise ValueError(f"adapter {request.lora_name!r}: {error}") from None
            known = self._checked.setdefault(request.lora_int_id, request)
        if known != request:
            raise ValueError(
                f"lora_int_id={request.lora_int_id} is already that of {known.lora_name!r} from {known.lora_path}: "
                f"give {request.lora_name!r} another one"
            )
        return Adapter(request.lora_int_id, str(path))

    def salt(self, adapter: Adapter | None, salt: str) -> str:
        """A salt that keeps cached prefixes apart by adapter (or the lack of one) and by the request's own salt."""
        return f"{0 if adapter is None else adapter.adapter_id} {salt}"

    def forget(self, adapter_id: int) -> None:
        """Forget an adapter that no request will name any more. Its id must not be used again."""
        self._checked.pop(adapter_id, None)
