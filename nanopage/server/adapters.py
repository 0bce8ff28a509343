"""The adapters of a server, LoRA and soft prompts: clients see each one as a separate model. POST
/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

import itertools
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nanopage.aio.async_llm import AsyncLLM
from nanopage.engine.input_processor import Adapters
from nanopage.inputs import LoRARequest
from nanopage.items.soft_prompts import PromptAdapterRequest, read_kind
from nanopage.server.errors import ApiError

MAX_ADAPTERS = 10_000
MAX_NAME = 256  # characters

AnyServed = LoRARequest | PromptAdapterRequest


class LoadBody(BaseModel):
    """lora_path: a directory on the server's machine."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str
    lora_path: str


class UnloadBody(BaseModel):
    """lora_int_id: accepted as in vLLM; it must be the adapter's id."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str
    lora_int_id: int | None = None


class ServedAdapters:
    """The adapters that clients may name. Ids are never used again, so that an adapter that is reloaded under the same
    name does not find the cached prefixes of the old adapter."""

    def __init__(self) -> None:
        self.requests: dict[str, AnyServed] = {}
        self._ids = itertools.count(1)

    def check(self, llm: AsyncLLM, name: str, path: str) -> LoRARequest:
        """Make an adapter, if its files fit the model. Reads the headers of the files. Raises: ValueError."""
        if not path:
            raise ValueError("lora_path is empty")
        request = LoRARequest(name, next(self._ids), str(_directory("lora_path", path)))
        _adapters(llm).check(request)
        return request

    def check_soft_prompt(self, llm: AsyncLLM, name: str, path: str) -> PromptAdapterRequest:
        """Make a soft prompt, if its files fit the model. Raises: ValueError."""
        directory = _directory("--prompt-adapters", path)
        try:
            _, count = read_kind(directory)
        except (ValueError, OSError) as error:
            raise ValueError(f"prompt adapter {name!r}: {error}") from None
        request = PromptAdapterRequest(name, next(self._ids), str(directory), count)
        llm.engine.input_processor.prompts.read({"prompt_token_ids": [0], "prompt_adapter_request": request})
        return request

    async def load(self, llm: AsyncLLM, model_names: list[str], body: LoadBody) -> str:
        """Raises: ApiError for a name that is in use, or an adapter that does not fit."""
        if not llm.engine.config.enable_lora:
            raise ApiError(400, "adapters need --enable-lora", code="not_enabled")
        if not 0 < len(body.lora_name) <= MAX_NAME or not body.lora_name.isprintable():
            raise ApiError(400, f"lora_name must have 1 to {MAX_NAME} printable characters", param="lora_name")
        if len(self.requests) >= MAX_ADAPTERS:
            raise ApiError(400, f"there are {MAX_ADAPTERS:,} adapters already", param="lora_name")
        self._check_free(model_names, body.lora_name)
        try:
            request = await llm.in_thread(self.check, llm, body.lora_name, body.lora_path)
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="lora_path") from None
        try:
            self._check_free(model_names, body.lora_name)  # another call may have taken the name meanwhile
        except ApiError:
            _adapters(llm).forget(request.lora_int_id)
            raise
        self.requests[body.lora_name] = request
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    def unload(self, llm: AsyncLLM, body: UnloadBody) -> str:
        """Remove an adapter. Running requests go on. Raises: ApiError if there is no such adapter."""
        request = self.requests.get(body.lora_name)
        if not isinstance(request, LoRARequest) or body.lora_int_id not in (None, request.lora_int_id):
            raise ApiError(404, f"there is no adapter {body.lora_name[:MAX_NAME]!r}", param="lora_name")
        del self.requests[body.lora_name]
        _adapters(llm).forget(request.lora_int_id)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _check_free(self, model_names: list[str], name: str) -> None:
        if name in self.requests or name in model_names:
            raise ApiError(400, f"the name {name!r} is in use", param="lora_name")


def _directory(what: str, path: str) -> Path:
    """Raises: ValueError."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # "~name" without such a user
        raise ValueError(f"{what}={path[:MAX_NAME]!r}: {error}") from None


def path_of(adapter: AnyServed) -> str:
    return adapter.lora_path if isinstance(adapter, LoRARequest) else adapter.prompt_adapter_local_path


def _adapters(llm: AsyncLLM) -> Adapters:
    """The engine's Adapters. Raises: ValueError if it has none."""
    if (adapters := llm.engine.input_processor.adapters) is None:
        raise ValueError("lora_request needs enable_lora=True")
    return adapters


def parse_modules(option: str, values: list[str]) -> dict[str, str]:
    """name -> path, from --lora-modules or --prompt-adapters. Raises: ValueError."""
    modules: dict[str, str] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not (name and equals and path) or len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(f"{option} {value}: not NAME=PATH")
        if name in modules:
            raise ValueError(f"{option}: {name} occurs twice")
        modules[name] = path
    return modules
