"""Items: where they go in a prompt, what the prefix cache makes of them, and prompt embeddings, beside transformers."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from helpers import CPU, BytesExecutor, run_together, tiny_hf_model, tiny_model

from nanopage import BeamSearchParams, EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.items.items import make_item
from nanopage.items.rows import ItemRows
from nanopage.step import Batch, BatchResult, EncoderCache, Fork, NewSequence, SamplingSettings
from nanopage.text.prompts import keys_of
from nanopage.weights.loader import read_config

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
run = partial(run_together, params=GREEDY)


def make_engine(path, **options):
    sizes = {"max_model_len": 100, "block_size": 4, "num_gpu_blocks_override": 100}
    fixed = {"dtype": "float32", "device": "cpu", "enforce_eager": True, "enable_prompt_embeds": True}
    return build_engine(EngineConfig(model=str(path), **fixed | sizes | options))


def image(content: int, position: int, length: int, cost: int = 0):
    return make_item("image", position, length, {"pixels": np.array([content])}, cost)


FAMILIES = {"llama": {}, "gemma2": {}, "gemma3_text": {}, "granite": {"embedding_multiplier": 3.0}, "lfm2": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_embeds_equal_transformers(family, tmp_path):
    """In chunks, from the prefix cache, through bytes; and where embeddings are multiplied by something."""
    hf_model = tiny_hf_model(family, **FAMILIES[family])
    hf_model.set_attn_implementation("eager")
    engine = make_engine(tiny_model(tmp_path, family, **FAMILIES[family]), max_num_batched_tokens=7)
    engine.executor = BytesExecutor(engine.executor)
    embeds = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)) * 2
    (first,) = run(engine, {"prompt_embeds": embeds})
    again, salted = run(engine, {"prompt_embeds": embeds[None]}, {"prompt_embeds": embeds, "cache_salt": "x"})
    assert (first.num_cached_tokens, again.num_cached_tokens, salted.num_cached_tokens) == (0, 16, 0)
    assert first.prompt is None and first.prompt_token_ids == [0] * 20
    x = embeds
    for tables in zip(*(output.outputs[0].logprobs for output in (first, again, salted)), strict=True):
        with torch.inference_mode():
            expected = hf_model(inputs_embeds=x[None], use_cache=False).logits[0, -1].log_softmax(0)
            row = hf_model.get_input_embeddings()(expected.argmax())
        x = torch.cat([x, row[None]])
        for table in tables:
            assert max(table, key=lambda token: table[token].logprob) == expected.argmax()
            for token, logprob in table.items():
                assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-4)


def test_embeddings_of_tokens_are_those_tokens(model):
    """Several completions, a beam search, a budget of one token, and neighbours with text."""
    rows = tiny_hf_model().get_input_embeddings().weight.detach()
    tokens = random.Random(0).choices(range(300), k=13)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=5)
    for budget in (1, 64):
        engine = make_engine(model, max_num_batched_tokens=budget)
        embeds = {"prompt_embeds": rows[tokens].double()}
        for chosen in (GREEDY, params, BeamSearchParams(width=3, max_tokens=4)):
            expected, other, made = run(engine, tokens, tokens[:5], embeds, params=chosen)
            assert [each.token_ids for each in made.outputs] == [each.token_ids for each in expected.outputs]
            assert run(engine, tokens[:5], params=chosen)[0].outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"prompt_embeds": [[1.0]]}, "prompt_embeds must be a torch.Tensor"),
        ({"prompt_embeds": torch.ones(3, 64, dtype=torch.int64)}, "dense tensor of floats, not torch.int64"),
        ({"prompt_embeds": torch.ones(3, 64).to_sparse()}, "torch.sparse_coo"),
        ({"prompt_embeds": torch.ones(3, 64, device="meta")}, "on meta"),
        ({"prompt_embeds": torch.ones(3, 63)}, r"the shape \[tokens, 64\], not \[3, 63\]"),
        ({"prompt_embeds": torch.ones(2, 3, 64)}, r"not \[2, 3, 64\]"),
        ({"prompt_embeds": torch.ones(0, 64)}, r"not \[0, 64\]"),
        ({"prompt_embeds": torch.tensor(1.0)}, r"not \[\]"),
        ({"prompt_embeds": torch.full((1, 64), torch.nan)}, "not finite in float32"),
        ({"prompt_embeds": torch.full((1, 64), 1e60, dtype=torch.float64)}, "not finite in float32"),
        ({"prompt_embeds": torch.ones(100, 64)}, "the prompt has 100 tokens"),
        ({"prompt_embeds": torch.ones(3, 64), "prompt": "a"}, "neither prompt nor prompt_token_ids"),
        ({"prompt_embeds": torch.ones(3, 64), "prompt_token_ids": [1]}, "neither prompt nor prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data is not supported by this model"),
        ({"prompt_embeds": None}, "'prompt' or 'prompt_token_ids'"),
    ],
)
def test_what_is_wrong_with_prompt_embeds_is_named(prompt, error, model):
    engine = make_engine(model)
    with pytest.raises((ValueError, TypeError), match=error):
        engine.add_request("a", prompt)
    assert not engine.has_unfinished_requests()


def test_prompt_embeds_need_their_option_and_have_no_log_probabilities(model):
    prompt = {"prompt_embeds": torch.ones(3, 64)}
    with pytest.raises(ValueError, match="prompt_embeds needs enable_prompt_embeds=True"):
        make_engine(model, enable_prompt_embeds=False).add_request("a", prompt)
    with pytest.raises(ValueError, match="prompt_logprobs does not work with embeddings"):
        make_engine(model).add_request("a", prompt, SamplingParams(prompt_logprobs=1))
    with pytest.raises(ValueError, match="enable_prompt_embeds=True does not work with model_impl='transformers'"):
        make_engine(model, model_impl="transformers")


def test_the_prefix_cache_tells_items_apart_and_shares_what_is_before_them():
    tokens = list(range(20))
    keys = [keys_of(tokens, [image(content, 6, 8)]) for content in (1, 2, 1)]
    assert keys[0] == keys[2] and keys[0][:6] == tokens[:6] and keys[0][14:] == tokens[14:]
    assert all(key < 0 for key in keys[0][6:14]) and not {*keys[0][6:14]} & {*keys[1][6:14]}
    # A shorter item begins with the same pseudo tokens: its hash differs if its content does.
    assert image(1, 6, 8).hash == image(1, 0, 8).hash != image(2, 6, 8).hash
    assert make_item("audio", 6, 8, {"pixels": np.array([1])}).hash != image(1, 6, 8).hash
    assert make_item("image", 6, 8, {"pixels": np.array([1], np.int32)}).hash != image(1, 6, 8).hash


def groups_with(items, scheduler, count, num_tokens=30):
    for number in range(count):
        seq = Sequence(number, [number] * num_tokens, SamplingSettings(), max_total_tokens=num_tokens + 1)
        scheduler.add(SequenceGroup(str(number), [seq], items=items))


def test_encoders_have_a_budget_of_their_own():
    scheduler = Scheduler(BlockManager(100, 4), 8, 40)
    # Three sequences of 30 tokens: an item of cost 30 begins at token 2, and one of cost 10 at token 20.
    groups_with([image(1, 2, 10, 30), image(2, 20, 4, 10)], scheduler, 3)
    steps = []
    while scheduler.has_unfinished() and len(steps) < 20:
        schedule = scheduler.schedule()
        batch = schedule.batch
        steps.append((batch.rows, batch.starts, batch.counts))
        scheduler.advance(schedule)
        scheduler.update(schedule, BatchResult([1] * len(batch.sampled_rows)))
    # In each step, one sequence takes the whole budget of 40.
    assert steps == [([0, 1, 2], [0, 0, 0], [30, 2, 2]), ([1], [2], [28]), ([2], [2], [28])]


def test_an_item_that_exceeds_the_budget_runs_first_in_a_step():
    scheduler = Scheduler(BlockManager(100, 4), 8, 16)
    groups_with([image(1, 0, 10, 1000)], scheduler, 2)
    assert scheduler.schedule().batch.counts == [16]


def test_rows_of_items(tmp_path):
    """Parts of items in chunks; outputs of encoders are kept by hash, within a limit."""
    config = read_config(tiny_model(tmp_path))
    calls = []

    def encode(payload):
        calls.append(payload["pixels"].flatten().tolist())
        return payload["pixels"][:, :1, None] + torch.arange(8.0)[:, None] / 10 + torch.zeros(8, 64)

    rows = ItemRows(config, {"image": encode}, torch.float64, CPU, most_bytes=2 * 8 * 64 * 4)

    def wide(content):
        return make_item("image", 0, 8, {"pixels": np.array([content, content])})

    items = [image(1, 2, 8), image(2, 12, 8)]
    new = [NewSequence(row, [0] * 30, 30, 0, SamplingSettings(), items=items if row else []) for row in range(3)]

    def step(batch):
        rows.update(batch)
        reaches, embeds = rows.reaches(batch), rows.embeds_of(batch)
        assert reaches == (embeds is not None)
        return None if embeds is None else (embeds[0].tolist(), [round(x, 1) for x in embeds[1][:, 0].tolist()])

    batch = Batch(new=new, rows=[0, 1, 2], starts=[0, 0, 0], counts=[4, 2, 5])
    assert step(batch) == ([8, 9, 10], [1.0, 1.1, 1.2]) and calls == [[1]]
    assert step(Batch(rows=[2, 1], starts=[5, 2], counts=[9, 1])) == (
        [*range(5), 7, 8, 9],
        [1.3, 1.4, 1.5, 1.6, 1.7, 2.0, 2.1, 1.0],
    )
    assert calls == [[1], [2]]
    rows.outputs_of([image(3, 0, 8)])  # the first one is used again, so the second is forgotten
    assert step(Batch(rows=[1], starts=[19], counts=[3])) == ([0], [2.7]) and calls == [[1], [2], [3], [2]]
    assert step(Batch(forks=[Fork(2, 0, 30, 0)], rows=[0, 1], starts=[2, 22], counts=[5, 1])) is None
    assert rows.left == {0: [], 1: [], 2: items}
    # Items of the same shape are encoded together; those that the cache has no room for are encoded again.
    rows.most_bytes = 0
    outputs = rows.outputs_of([image(4, 0, 8), image(5, 0, 8), image(4, 9, 8), wide(6)])
    assert calls[4:] == [[4, 5], [6, 6]] and [int(output[0, 0]) for output in outputs.values()] == [4, 5, 6]
    assert rows.outputs.keys() == {wide(6).hash}
    assert rows.cache == EncoderCache(1, 8 * 64 * 4, queries=8, hits=1)
    rows.outputs_of([], [image(content, 0, 8, cost=3000) for content in (7, 8, 9)])  # what no budget has counted
    assert calls[6:] == [[7, 8], [9]]
