"""The real default model against transformers: greedy text in float32, log-probabilities in bfloat16.

NANOPAGE_LONG_TESTS=1 pytest tests/test_default_model.py -s      all prompts, and compiled code in both dtypes
"""

import os

import pytest
import torch
from helpers import LONG, ForkedLink
from transformers import AutoModelForCausalLM

from nanopage import LLM, BeamSearchParams, SamplingParams
from nanopage.device import computes_natively

# transformers continues a prompt at 25 tokens a second, and compiling takes 40 s a dtype.
NUM_PROMPTS, NUM_TOKENS = (20, 64) if LONG else (2, 16)
BFLOAT16 = computes_natively("bfloat16", torch.device("cpu"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PROMPTS = [
    "What is the capital of France?",
    "def fibonacci(n):\n    ",
    "List three uses of a paperclip.",
    "日本の首都はどこですか？",
    "Summarize: The quick brown fox jumps over the lazy dog. It then runs into the forest and sleeps.",
    '{"name": "Ada", "born": 1815, "known_for":',
    "Explain photosynthesis to a child.",
    "Write a haiku about the sea.",
    "Translate to Spanish: Good morning, how are you?",
    "Why is the sky blue?",
    "Once upon a time, in a land far away,",
    "What is 17 * 23? Think step by step.",
    "Give me a recipe for pancakes.",
    "SELECT name FROM users WHERE",
    "Who wrote 'Pride and Prejudice', and when?",
    "Schreibe einen Satz über den Winter.",
    "Is a tomato a fruit or a vegetable? 🍅",
    "The three laws of robotics are:\n1.",
    "Compare cats and dogs as pets in two sentences.",
    "Please write a polite e-mail declining an invitation to a wedding on 12 June 2021 at 14:30.",
]


def token_ids(llm) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    ids = []
    for i, prompt in enumerate(PROMPTS[:NUM_PROMPTS]):
        if i % 2 == 0:  # half of them go through the chat template, the others are continued as they stand
            text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            ids.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            ids.append(tokenizer.encode(prompt))
    return ids


def generate_with_transformers(model, prompts, count) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=count, pad_token_id=2)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def load(path, eager, **options) -> LLM:
    """Compiled unless `eager`; the code stays in the user's cache, beside the default model."""
    llm = LLM(str(path), device="cpu", kv_cache_gib=0.5, enforce_eager=eager, **options)
    llm.engine.executor.compile()
    compiled = llm.engine.executor.worker.compiled
    assert compiled is None if eager else compiled.layers and compiled.head is not None
    return llm


compiled = pytest.param(
    False,
    id="compiled",
    marks=pytest.mark.skipif(not LONG, reason="compiles for 40 s; runs with NANOPAGE_LONG_TESTS=1"),
)


@pytest.fixture(scope="module")
def uncompiled(default_model) -> LLM:
    return load(default_model, eager=True, dtype="float32")


@pytest.fixture(scope="module")
def reference(default_model):
    """The model in transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def generated(reference, uncompiled) -> list[list[int]]:
    """What transformers' generate makes of the prompts."""
    return generate_with_transformers(reference, token_ids(uncompiled), NUM_TOKENS)


@pytest.mark.parametrize("eager", [pytest.param(True, id="eager"), compiled])
def test_prompts_are_continued_token_for_token_as_by_generate(default_model, uncompiled, generated, eager):
    llm = uncompiled if eager else load(default_model, eager, dtype="float32")
    prompts = token_ids(llm)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    ours = [output.outputs[0].token_ids for output in outputs]
    differing = [i for i, (a, b) in enumerate(zip(ours, generated, strict=True)) if a != b]
    print(f"\n{len(prompts) - len(differing)} of {len(prompts)} equal, {sum(map(len, ours))} tokens")
    assert differing == [] and "Paris" in outputs[0].outputs[0].text


@pytest.mark.skipif(not LONG, reason="starts three processes; runs with NANOPAGE_LONG_TESTS=1, tiny models always")
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}], ids=str)
def test_a_divided_model_continues_them_as_well(default_model, generated, options, monkeypatch):
    """Its 9 heads and 3 KV heads on three workers; its 30 layers in two stages."""
    monkeypatch.setattr("nanopage.distributed.process_executor.ProcessLink", ForkedLink)
    num_prompts, num_tokens = NUM_PROMPTS, NUM_TOKENS
    llm = LLM(str(default_model), device="cpu", dtype="float32", kv_cache_gib=0.5, enforce_eager=True, **options)
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    outputs = llm.generate(token_ids(llm)[:num_prompts], params, use_tqdm=False)
    llm.engine.shutdown()
    expected = [tokens[:num_tokens] for tokens in generated[:num_prompts]]
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.skipif(not BFLOAT16 and not LONG, reason="takes minutes where bfloat16 is emulated")
@pytest.mark.parametrize("eager", [pytest.param(True, id="eager"), compiled])
def test_bfloat16_stays_close_to_transformers(default_model, eager):
    """vLLM's check_logprobs_close: where two greedy texts part, each token is among the other's five likeliest."""
    if not eager and not BFLOAT16:
        pytest.skip("there is no compiled code for a dtype that this machine emulates")
    llm = load(default_model, eager, dtype="bfloat16")
    prompts = token_ids(llm)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.bfloat16).eval()
    agreed, total, worst = 0, 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1].float()
        theirs = logits.argmax(dim=-1).tolist()
        equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        agreed, total = agreed + equal, total + len(ours)
        logprobs = logits.log_softmax(dim=-1)
        for i in range(min(equal + 1, len(ours))):
            assert theirs[i] in output.outputs[0].logprobs[i]
            assert ours[i] in logprobs[i].topk(5).indices
            worst = max(worst, abs(output.outputs[0].logprobs[i][ours[i]].logprob - logprobs[i, ours[i]].item()))
    print(f"\n{agreed} of {total} tokens before the first difference; log-probabilities within {worst:.3f}")
    assert worst < 0.5


@pytest.mark.skipif(not LONG, reason="takes 5 s; runs with NANOPAGE_LONG_TESTS=1, tiny models always")
def test_beam_search_finds_the_sequences_and_scores_of_transformers(reference, uncompiled):
    width, count = 4, 24
    prompts = token_ids(uncompiled)[::2]  # transformers takes two seconds for each
    outputs = uncompiled.beam_search(prompts, BeamSearchParams(width=width, max_tokens=count), use_tqdm=False)
    options = {
        "num_beams": width,
        "num_return_sequences": width,
        "do_sample": False,
        "repetition_penalty": 1.0,
        "max_new_tokens": count,
    }
    options |= {"pad_token_id": 2, "return_dict_in_generate": True, "output_scores": True}
    equal, worst = 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs = reference.generate(torch.tensor([prompt]), **options)
        sequences = [without_padding(row[len(prompt) :].tolist()) for row in theirs.sequences]
        equal += [completion.token_ids for completion in output.outputs] == sequences
        scores = torch.tensor([completion.score for completion in output.outputs])
        worst = max(worst, (scores - theirs.sequences_scores).abs().max().item())
    print(f"\n{equal} of {len(prompts)} prompts: all {width} sequences equal; scores within {worst:.1e}")
    assert equal == len(prompts)
    assert worst < 1e-4


def without_padding(token_ids: list[int], end: int = 2) -> list[int]:
    """Up to the first end-of-sequence token, which transformers repeats as padding."""
    return token_ids[: token_ids.index(end) + 1] if end in token_ids else token_ids
