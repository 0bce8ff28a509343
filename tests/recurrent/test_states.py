"""States of layers in the blocks of the KV cache (recurrent/states.py): what the fuzz suite does not show."""

import json
import logging

import pytest
import torch
from helpers import finish, random_tokens, tiny_model
from transformers import AutoModelForCausalLM

from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.state.layer_kinds import STATE
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch
from nanopage.worker.state_pages import state_pages

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("states"), "lfm2", hidden_size=32)


def run(engine, prompt):
    """Run a request. Returns: the tokens of its output, and how many of its prompt were cached."""
    engine.add_request("0", {"prompt_token_ids": prompt}, GREEDY)
    output = finish(engine)["0"]
    return output.outputs[0].token_ids, output.num_cached_tokens


def make_engine(model, **options):
    return build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", max_model_len=64, **options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_lora": True}, "enable_lora"),
        (
            {"speculative_config": {"method": "draft_model", "model": "HERE", "num_speculative_tokens": 3}},
            "speculative_config: layers of the draft model .* have a state",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not work with Lfm2ForCausalLM"),
    ],
)
def test_options_that_states_do_not_allow_are_refused_by_name(model, options, named):
    options = json.loads(json.dumps(options).replace("HERE", str(model)))
    with pytest.raises(ValueError, match=named):
        make_engine(model, **options)


def test_a_state_is_found_at_the_end_of_a_prompt_and_where_another_one_has_left_it(model):
    """Blocks of 4. K and V of the 20 tokens that prompts share are known after the first prompt, but no state there:
    the second prompt computes all, in steps that end there. The third one goes on from it."""
    engine, (long, *others) = make_engine(model, block_size=4), random_tokens([40, 9, 9])
    expected = run(engine, long)
    assert expected[1] == 0
    prompts = [long[:22] + other for other in others]
    assert [run(engine, prompt)[1] for prompt in prompts] == [0, 20]
    assert run(engine, long) == (expected[0], 36)
    alone = make_engine(model, enable_prefix_caching=False)
    for prompt in prompts:
        assert run(engine, prompt)[0] == run(alone, prompt)[0]


def test_a_block_has_room_for_a_state(tmp_path, caplog):
    """A state of 99 inputs of 32 channels takes more than K and V of 16 tokens."""
    tiny_model(tmp_path, "lfm2", torch.float64, hidden_size=32, conv_L_cache=100)
    with caplog.at_level(logging.INFO, "nanopage"):
        engine = make_engine(tmp_path)
    assert engine.config.block_size == 128 and "block_size is 128, not 16" in caplog.text
    prompt = random_tokens([50])[0]
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = hf_model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert run(engine, prompt)[0] == expected[0, 50:].tolist()


def test_blocks_of_states_are_contiguous():
    """As compiled code expects, which would read others without an error."""
    table = SequenceTable(3, 16, 4, 8, torch.device("cpu"), windows=(None, STATE, STATE))
    table.block_tables[:] = torch.arange(table.block_tables.numel()).view_as(table.block_tables)
    batch = Batch(rows=[2, 0], starts=[8, 0], counts=[1, 6], sampled_from=[0, 5, 6], sampled_rows=[2, 0, 0])
    (kind, first), (_, second) = state_pages(batch, table).items()
    assert (
        kind == 1 and first.sources.tolist() == [24 + 1 * 3 + 1, -1] and first.targets.tolist() == [24 + 2 * 3 + 1, 4]
    )
    assert all(blocks.is_contiguous() for blocks in (first.sources, first.targets, second.sources, second.targets))
