"""A tiny random Llama, and the greedy tokens that nanopage gives for it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from nanopage.build import build_engine
from nanopage.config.options import EngineConfig
from nanopage.grading.worlds import MAX_TOKENS, VOCAB_SIZE
from nanopage.params import SamplingParams


def write_model(directory: Path) -> None:
    """In float64, in which no order of additions changes a token. The weights are large, so that a wrong key does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.4, architectures=["LlamaForCausalLM"]))
    model.config.save_pretrained(directory)
    save_file(model.double().state_dict(), directory / "model.safetensors")
    words = {str(token): token for token in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(directory / "tokenizer.json"))


class Reference:
    """A model, written to an empty directory, and its greedy tokens by nanopage's engine."""

    def __init__(self, directory: Path):
        write_model(directory)
        self.model_dir = directory
        sizes: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
        config = EngineConfig(model=str(directory), dtype="float64", device="cpu", enforce_eager=True, **sizes)
        self.engine = build_engine(config)
        self.known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompts: list[tuple[int, ...]]) -> list[list[int]]:
        """The next MAX_TOKENS tokens of each prompt."""
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
        missing = {str(prompt): prompt for prompt in prompts if prompt not in self.known}
        for name, prompt in missing.items():
            self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    self.known[missing[output.request_id]] = list(output.outputs[0].token_ids)
        return [self.known[prompt] for prompt in prompts]
