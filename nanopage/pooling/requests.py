"""PoolingRequests: makes the requests of a model that turns texts into vectors, for its InputProcessor.

`ByLength` chooses which requests an encoder computes together.
"""

from functools import partial
from typing import cast

from nanopage.checks.pooling import PoolingConfig
from nanopage.engine.input_processor import InputProcessor
from nanopage.engine.output_processor import Request
from nanopage.engine.queues import order
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.engine.token_budget import TokenBudget
from nanopage.files.model_files import shown
from nanopage.inputs import Prompt
from nanopage.params import PoolingParams
from nanopage.pooling.vectors import add_vector
from nanopage.step import SamplingSettings
from nanopage.text.prompts import PromptTooLongError

WINDOW = 4096  # waiting groups from which a batch is chosen


class PoolingRequests:
    """Makes requests with PoolingParams.

    Args:
        processor: the engine's InputProcessor.
        pooling: how the model makes vectors.
    """

    def __init__(self, processor: InputProcessor, pooling: PoolingConfig):
        self.processor, self.prompts, self.pooling = processor, processor.prompts, pooling

    def make_request(self, request_id: str, prompt: Prompt, params: object, priority: int) -> Request:
        """A request for a vector. `prompt` may also be {"prompt": text, "text_pair": text}: a pair to score."""
        pooling, processor, name = self.pooling, self.processor, self.prompts.path.name
        if not isinstance(params, PoolingParams):
            makes = "embeddings" if pooling.task == "embed" else "scores of classes"
            raise ValueError(f"the model {name} runs with runner='pooling': it makes {makes}, not text")
        check_params(params, pooling, processor.model_config.hidden_size)
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        fields = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        pair, text, types = fields.pop("text_pair", None), fields.get("prompt"), None
        if pair is not None:
            if not pooling.scores:
                raise ValueError(f"the model {name} does not score pairs of texts")
            for each in (text, pair):
                if not isinstance(each, str):
                    raise TypeError(f"each text of a pair must be a string, not {shown(each)}")
            fields["prompt_token_ids"], types = self._encode_pair(cast(str, text), cast(str, pair), params)
        elif isinstance(text, str) and fields.get("prompt_token_ids") is None:
            fields["prompt"] = text = pooling.prompt_for(params.prompt_name) + text
            fields["prompt_token_ids"], types = self._encode(text, None, params)
        elif params.prompt_name is not None:
            raise ValueError("prompt_name is for prompts of text")
        read = self.prompts.read(fields)
        if types is None and pair is None:  # the ids may be the client's
            read.token_ids = read.token_ids[: self._most_tokens(params)]
        self._check_size(len(read.token_ids))
        settings = SamplingSettings(temperature=0, pooling_type=pooling.pooling_type, token_types=types)
        seq = Sequence(
            next(processor.seq_ids),
            read.token_ids,
            settings,
            max_total_tokens=len(read.token_ids) + 1,
            cache_salt=read.cache_salt,
        )
        group = SequenceGroup(request_id, [seq], priority)
        fill = partial(add_vector, group, params, pooling)
        return Request(group, params, read.text, read.token_ids, [], fill)

    def _check_size(self, num_tokens: int) -> None:
        """Raises: ValueError for a prompt that could never run."""
        processor = self.processor
        if num_tokens > processor.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, more than max_model_len={processor.max_model_len}: give "
                "truncate_prompt_tokens=-1 to keep the first ones"
            )
        blocks = processor.needs.of([num_tokens])
        if blocks > processor.num_blocks:
            raise ValueError(
                f"the prompt of {num_tokens} tokens needs {blocks} blocks, the KV cache has {processor.num_blocks}: "
                "raise kv_cache_gib"
            )

    def _most_tokens(self, params: PoolingParams) -> int | None:
        """How many tokens of a longer text are kept. None: all."""
        most, limit = params.truncate_prompt_tokens, self.processor.max_model_len
        if most is not None and most > limit:
            raise ValueError(f"truncate_prompt_tokens={most} is more than max_model_len={limit}")
        return limit if most == -1 else most

    def _encode_pair(self, first: str, second: str, params: PoolingParams) -> tuple[list[int], list[int] | None]:
        """The tokens of a pair, and which text each belongs to (None: the model does not say)."""
        if self.processor.model_config.is_encoder:
            return self._encode(first, second, params)
        if self.pooling.template is None:
            return self._encode(first + second, None, params)[0], None
        before, pair, behind = self.pooling.template
        head, tail = (self.prompts.encode(text, add_special_tokens=False) for text in (before, behind))
        tokenizer = self.prompts.require_tokenizer("a pair of texts", "a model with a tokenizer")
        most = self._most_tokens(params)
        for text in (first, second):
            self.prompts.check_text(text, most is not None)
        ids = tokenizer.encode(pair.format(first, second), add_special_tokens=False)
        if most is not None:  # the text behind the pair stays
            if (room := most - len(head) - len(tail)) < 1:
                raise ValueError(f"truncate_prompt_tokens={most} leaves no room beside the prompt around the pair")
            ids = ids[:room]
        return head + ids + tail, None

    def _encode(self, text: str, pair: str | None, params: PoolingParams) -> tuple[list[int], list[int] | None]:
        """The tokens of a text or a pair, truncated, with special tokens, and the tokens' types."""
        tokenizer = self.prompts.require_tokenizer("a prompt of text", "prompt_token_ids")
        most = self._most_tokens(params)
        for each in (text,) if pair is None else (text, pair):
            self.prompts.check_text(each, most is not None)
        ids, types = tokenizer.encode_truncated(text, pair, most)
        return ids, types if self.processor.model_config.type_vocab_size > 1 else None


class ByLength:
    """Chooses what an encoder computes together, as a Scheduler's `arrange`.

    Args: budget: the token budget of a step. It grows while a longer text waits, because texts are not divided.
    """

    def __init__(self, budget: TokenBudget):
        self.budget = budget

    def arrange(self, waiting: list[SequenceGroup]) -> None:
        """Keep the first group first. Put behind it the groups that are closest to it in length: first those of its
        priority, then those of lower priorities. So within a priority no request waits forever, and most sequences of a
        batch share calls of attention with others of equal length."""
        if waiting:
            first = min(waiting, key=order)
            others = [group for group in waiting if group is not first]
            window = sorted(others[:WINDOW], key=lambda g: (g.priority, abs(g.shared_len - first.shared_len)))
            waiting[:] = [first, *window, *others[WINDOW:]]  # one statement: no signal handler loses a group
            self.budget.tokens = max(self.budget.most, first.shared_len, *(group.shared_len for group in window))


def check_params(params: PoolingParams, config: PoolingConfig, size: int) -> None:
    """Args: size: the size of an embedding. Raises: ValueError for a parameter that is not for this model."""
    if config.task == "embed":
        if params.use_activation is not None:
            raise ValueError("use_activation is for models that classify, and this one makes embeddings")
        if params.dimensions is not None and params.dimensions > size:
            raise ValueError(f"dimensions={params.dimensions} is more than the {size} of the model's embeddings")
        return
    for name in ("dimensions", "normalize", "prompt_name"):
        if getattr(params, name) is not None:
            raise ValueError(f"{name} is for models that make embeddings, and this one classifies")
