"""SpeculativeConfig: where guessed tokens come from, and how many."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

from nanopage.checks.options import check, integer
from nanopage.files.model_files import shown

DraftLength = Annotated[int, integer(1, 64)]  # tokens
MOST_ROWS = 32  # With more sequences, a step computes so much that drafts do not pay, so none are looked for.
HEADS = ("eagle3", "mtp")  # methods with a head, which reads hidden states of the model


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made. Names are vLLM's.

    method: "ngram": the last tokens of a sequence have occurred in it before, and the draft is what followed them there
        (prompt lookup). "draft_model": a smaller model with the same vocabulary guesses. "eagle3", "mtp": a head that
        was trained with the model guesses (speculation/heads.py); "mtp" is in the model's checkpoint.
    num_speculative_tokens: most tokens of a draft.
    model: the draft model: a directory, a .gguf file or a hub id. Its dtype, device and block size are the engine's. It
        has as many blocks of KV cache as the engine has. With "eagle3", the head: a directory or a hub id.
    prompt_lookup_max, prompt_lookup_min: with "ngram", the most and the fewest last tokens that are looked up, the most
        first. By default 4 and 2. If only one is given, the default of the other adapts to it.
    """

    method: Literal["ngram", "draft_model", "eagle3", "mtp"]
    num_speculative_tokens: DraftLength
    prompt_lookup_max: DraftLength = 4
    prompt_lookup_min: DraftLength = 2
    model: str | None = None

    @classmethod
    def from_dict(cls, values: dict) -> "SpeculativeConfig":
        """Raises: TypeError, ValueError naming the key."""
        if not isinstance(values, dict):
            raise TypeError(f"speculative_config must be a dict or None, not {shown(values)}")
        values = {key: value for key, value in values.items() if value is not None}
        names = list(cls.__dataclass_fields__)
        if unknown := [key for key in values if key not in names]:
            raise ValueError(
                f"speculative_config has {', '.join(map(shown, unknown))}, which is not supported; supported: "
                f"{', '.join(names)}"
            )
        for name in ("method", "num_speculative_tokens"):
            if name not in values:
                raise ValueError(f"speculative_config: {name} is missing")
        for name, kind in get_type_hints(cls, include_extras=True).items():
            if name in values and name != "model":
                check(f"speculative_config: {name}", values[name], kind)
        method = values["method"]
        takes = {"ngram": ("prompt_lookup_max", "prompt_lookup_min"), "mtp": ()}.get(method, ("model",))
        for name in values:
            if name not in ("method", "num_speculative_tokens", *takes):
                raise ValueError(f"speculative_config: {name} is not for method={method!r}")
        if takes == ("model",):
            model = values.get("model")
            if model is None:
                raise ValueError(f"speculative_config: method={method!r} needs model")
            if not isinstance(model, str | Path) or not str(model):
                raise TypeError(f"speculative_config: model must be a path or a hub id, not {shown(model)}")
            return cls(method, values["num_speculative_tokens"], model=str(model))
        most = values.get("prompt_lookup_max", max(4, values.get("prompt_lookup_min", 1)))
        least = values.get("prompt_lookup_min", min(2, most))
        if least > most:
            raise ValueError(f"speculative_config: prompt_lookup_min={least} is more than prompt_lookup_max={most}")
        return cls(method, values["num_speculative_tokens"], most, least)
