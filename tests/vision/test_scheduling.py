"""Scheduling never changes the answer, with images in the prompts: chunks, preemption, swaps, forks and drafts."""

import random

import pytest
from helpers import ForkedLink
from seeing import QWEN_PLACE, gemma_model, idefics_model, picture, qwen_model

from nanopage import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

# (blocks, tokens of a step, other options). The blocks are too few for all prompts at once.
SQUARES = ((30, 16, {}), (50, 50, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}))
WHOLE = ((120, 10, {"block_size": 4}), (60, 33, {"preemption_mode": "swap"}))
AXES = ((8, 16, {}), (8, 7, {"speculative_config": SQUARES[1][2]["speculative_config"], "preemption_mode": "swap"}))
SMALL = {"preprocessor": {"size": {"longest_edge": 64}}}


def prompts_with(placeholder):
    rng, prompts = random.Random(1), []
    for index in range(6):
        count = rng.randrange(3)
        text = rng.choice(["the cat ", "in the morning "]) + " and ".join([placeholder] * count) + " dog" * index
        images = [picture(rng.choice([30, 60]), 40, rng.randrange(2)) for _ in range(count)]
        prompts.append({"prompt": text, "multi_modal_data": {"image": images}})
    return prompts


def answers(llm, *asked):
    outputs = llm.generate(*map(list, zip(*asked, strict=True)), use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("save", "options", "placeholder", "ways"),
    [
        (idefics_model, SMALL, "<image>", SQUARES),
        (gemma_model, {}, "<start_of_image>", WHOLE),
        (qwen_model, {}, QWEN_PLACE, AXES),
    ],
    ids=["SmolVLM", "Gemma 3", "Qwen2.5-VL"],
)
def test_scheduling_never_changes_the_answer(save, options, placeholder, ways, tmp_path):
    save(tmp_path, **options)
    prompts = prompts_with(placeholder)
    params = [SamplingParams(seed=seed, max_tokens=10, ignore_eos=True, n=1 + seed % 3 // 2) for seed in range(6)]

    common = {"enforce_eager": True, "dtype": "float64"}
    alone = LLM(str(tmp_path), num_gpu_blocks_override=300, enable_prefix_caching=False, **common)
    expected = [*(answers(alone, each)[0] for each in zip(prompts, params, strict=True))]
    for blocks, budget, more in ways:
        llm = LLM(str(tmp_path), num_gpu_blocks_override=blocks, max_num_batched_tokens=budget, **common, **more)
        for _ in range(2):  # the second time with cached prefixes, which may end within an image
            assert answers(llm, *zip(prompts, params, strict=True)) == expected


@pytest.mark.parametrize(
    ("save", "options", "placeholder"),
    [(idefics_model, SMALL, "<image>"), (qwen_model, {}, QWEN_PLACE)],
    ids=["SmolVLM", "Qwen2.5-VL"],
)
def test_divided_models_see_the_same(save, options, placeholder, tmp_path, monkeypatch):
    monkeypatch.setattr("nanopage.distributed.process_executor.ProcessLink", ForkedLink)
    save(tmp_path, text={"vocab_size": 320, "num_hidden_layers": 2}, **options)
    common = {"enforce_eager": True, "dtype": "float64", "num_gpu_blocks_override": 60, "max_num_batched_tokens": 50}
    asked = [
        (prompt, SamplingParams(seed=0, max_tokens=6, ignore_eos=True)) for prompt in prompts_with(placeholder)[:4]
    ]
    expected = answers(LLM(str(tmp_path), **common), *asked)
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        llm = LLM(str(tmp_path), **common, **{option: 2})
        try:
            assert answers(llm, *asked) == expected
        finally:
            llm.engine.shutdown()
