"""Where the model of a chat comes from: a server at a URL, a server of this user on this machine, or this process."""

import contextlib
import dataclasses
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import nanopage
from nanopage.config.options import EngineConfig
from nanopage.files.local_servers import LocalServer, fingerprint, local_servers, socket_of
from nanopage.params import SamplingParams
from nanopage.startup.imports import quick_imports
from nanopage.terminal.calls import Server, ServerError
from nanopage.terminal.images import check_sight
from nanopage.terminal.remote import connect, find_card
from nanopage.terminal.reply import NO_TEMPLATE, Model
from nanopage.terminal.spinner import spinner
from nanopage.terminal.text import say

PROBE_SECONDS = 1.0  # for a server here to answer
# Options that change what a model answers, or when its context is full.
OF_ANSWERS = (
    *("dtype", "device", "max_model_len", "kv_cache_dtype", "quantization", "enforce_eager"),
    *("hf_overrides", "load_format", "generation_config", "model_impl", "batch_invariant"),
)
Loaded = tuple[Model, str, SamplingParams]  # a model, its name and its settings


class Load(Protocol):
    """Gets a model by the argument of --model or /model."""

    def check(self, model: str | None, sight: bool) -> None:
        """Raises: ValueError, OSError if the model is not available.

        Args: sight: whether the conversation has images.
        """

    def __call__(self, model: str | None, sight: bool = False) -> Loaded:
        """Raises: ValueError, OSError, MemoryError.

        Args: sight: whether the model is to see images. A server that does not say whether it does is tried.
        """


@dataclass
class FromServer:
    """Models of a server. `asked`: settings of the user."""

    server: Server
    asked: dict[str, Any]

    def check(self, model: str | None, sight: bool) -> None:
        find_card(self.server, model)

    def __call__(self, model: str | None, sight: bool = False) -> Loaded:
        return connect(self.server, model, self.asked, f"at {self.server.url}")


@dataclass
class FromHere:
    """Models on this machine: from a nanopage server of this user if one has exactly this model, otherwise in this
    process.

    Args:
        options: of an engine in this process, by name.
        asked: settings of the user.
        raw, tools: whether the model goes without a chat template, and whether it is to call tools.
        attach: False uses no server.
        key: an API key; then a server is needed.

    Raises: ValueError, TypeError for options that are wrong whatever the model is.
    """

    options: dict[str, Any]
    asked: dict[str, Any]
    raw: bool
    tools: bool
    attach: bool
    key: str | None = None

    def __post_init__(self) -> None:
        self._config = EngineConfig(**self.options)

    def check(self, model: str | None, sight: bool) -> None:
        from nanopage.terminal.local import check_model
        from nanopage.weights import hub

        check_model(hub.resolve(model), self.raw, sight)

    def __call__(self, model: str | None, sight: bool = False) -> Loaded:
        if self.attach and (found := self._attached(model, sight)) is not None:
            return found
        if self.key is not None:
            raise ValueError("--api-key is for a server, and no nanopage server of yours here has this model")
        from nanopage.text.chat_template import TemplateRenderer
        from nanopage.weights import hub
        from nanopage.weights.inventory import bytes_of_weights

        path, name = hub.resolve(model), hub.name_of(model)
        loading = f"Loading {name}: {bytes_of_weights(path) / 1e9:.1f} GB of weights"
        with spinner(loading) as update:
            renderer = TemplateRenderer()
            if not self.raw:
                renderer.start()  # meanwhile
            with quick_imports():
                from nanopage.terminal.local import load_model  # takes seconds

            def show(done: int, total: int) -> None:
                update(f"{loading}, {done / total:.0%}")

            # A conversation has one request at a time. This bounds the KV cache.
            options = {"max_num_seqs": 4, "seed": self.asked.get("seed", random.getrandbits(32))} | self.options
            loaded, params = load_model(path, name, options, self.raw, self.tools, sight, show)
            loaded.llm.get_tokenizer().renderer = renderer
        return loaded, name, dataclasses.replace(params, **self.asked)

    def _attached(self, model: str | None, sight: bool) -> Loaded | None:
        """The model of the latest server that has it and answers; None without one."""
        try:
            found = local_servers()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            say(f"No nanopage server here is used: {error}", "yellow")
            return None
        if not found:
            return None
        from nanopage.weights.inventory import identity

        wanted = identity(model)
        for file, entry in found:
            server, which = Server("http://localhost/v1", self.key, socket_of(file)), f"(pid {entry.pid})"
            if entry.model != wanted or not server.answers("../health", PROBE_SECONDS):
                continue
            with contextlib.suppress(ServerError):  # 404: it never sleeps
                if server.get("../is_sleeping", PROBE_SECONDS).get("is_sleeping"):
                    say(f"The nanopage server that runs here {which} is not used: it sleeps.")
                    continue
            if why_not := self._why_not(entry):
                say(f"The nanopage server that runs here {which} is not used: {why_not}.")
                continue
            if not (self.raw or entry.has_template):
                raise ValueError(f"{entry.name} {NO_TEMPLATE}")
            if sight:
                check_sight(entry.sees_images, entry.name)
            where = f"by the nanopage server that runs here {which}"
            loaded = connect(server, entry.name, self.asked, where, entry.sees_images)
            say(f"Using the nanopage server that runs here {which}; --no-attach loads the model in this process.")
            return loaded
        return None

    def _why_not(self, entry: LocalServer) -> str:
        """Why a server with this model cannot replace an engine in this process; empty if it can."""
        ours, default, theirs = asdict(self._config), asdict(EngineConfig()), entry.options
        given = [name for name in self.options if ours[name] != default[name]]
        for name in (*OF_ANSWERS, *given):
            if (value := theirs.get(name)) != ours[name]:
                option = f"--{name.replace('_', '-')}"
                return f"it was started without {option}" if value == default[name] else f"it has {option} {value}"
        if entry.version != nanopage.__version__:
            return f"it is nanopage {entry.version}"
        from nanopage.weights.inventory import hub_models, snapshot

        root = hub_models().get(entry.model)
        if root is not None and snapshot(root).resolve() != Path(entry.path):
            return "there is another version of the model on this disk"
        with contextlib.suppress(OSError):
            if fingerprint(Path(entry.path)) == entry.files:
                return "it needs --api-key" if entry.needs_key and self.key is None else ""
        return "the model's files have changed since it read them"
