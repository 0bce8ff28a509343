"""Scheduling never changes the answer: random worlds against an oracle that runs one request at a time.

A world is a tiny float64 model with a random pool, host pool, block size, token budget, policy and set of requests that
arrive, share prefixes, fork into several completions or beams, get preempted, swapped and aborted at random. The oracle
has one block per sequence, no prefix cache and no neighbours; it runs every completion by itself, and recomputes every
beam from its tokens at every step. In half of the worlds, some prompts have embeddings in the place of tokens; in
others, images and soft prompts, too. Rounding cannot hide or fake a difference in float64. With `batch_invariant`, it
cannot in float32 and bfloat16, and then log-probabilities are equal to the bit. In half of the worlds, the messages
between the engine and its worker travel as bytes. Steps that do not overlap check drafts: the oracle's continuation,
the same with a wrong token, and random tokens.

    NANOPAGE_FUZZ_WORLDS=2000 pytest tests/test_fuzz.py -s      more worlds, and what happened in them
    NANOPAGE_FUZZ_SEED=7 ...                                    other worlds
    NANOPAGE_FUZZ_TRITON_WORLDS=50 ...                          more of those whose attention is Triton's
    NANOPAGE_FUZZ_GPU_WORLDS=36 ... -m gpu                      more of those on a GPU
    NANOPAGE_FUZZ_RANK_WORLDS=500 NANOPAGE_FUZZ_RANKS=2x2 ...   more of those with several workers
"""

import json
import os
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import pytest
import torch
from draft_heads import TAPS, save_eagle
from helpers import LONG, BytesExecutor, ForkedLink, save_tokenizer, tiny_bart, tiny_model, tiny_t5
from on_a_cpu import graphs_for, make_sample_all, pieces_for
from safetensors.torch import load_file, save_file
from seeing import gemma_model, idefics_model, picture, qwen_model
from test_lora import save_adapter

from nanopage import (
    BeamSearchParams,
    EngineConfig,
    LLMEngine,
    LoRARequest,
    PromptAdapterRequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    build,
)
from nanopage.beams.search import Beam, BeamSearch
from nanopage.build import build_engine
from nanopage.device import computes_natively
from nanopage.distributed.process_executor import ProcessExecutor
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.input_processor import branch_seed
from nanopage.items.items import make_item
from nanopage.kernels import paged_attention
from nanopage.outputs import RequestEvent
from nanopage.params import RequestOutputKind
from nanopage.speculation.drafts import Drafts
from nanopage.speculation.lookup import StepTimes
from nanopage.state.layer_kinds import BlockNeeds, divide_layers
from nanopage.step import Item, WorkerDiedError
from nanopage.text.prompts import TokenizedPrompt
from nanopage.view.explain import make_sentences, told
from nanopage.view.frames import Frames
from nanopage.view.invariants import check_blocks
from nanopage.view.picture import Picture
from nanopage.worker import jit
from nanopage.worker.cuda_graphs import CUDAGraphs
from nanopage.worker.eager import Eager
from nanopage.worker.memory import GIB, block_bytes
from nanopage.worker.piecewise_graphs import PiecewiseGraphs
from nanopage.worker.ways import why_not_compiled

RANK_WORLDS = int(os.environ.get("NANOPAGE_FUZZ_RANK_WORLDS", "2" if LONG else "1"))
RANKS = os.environ.get("NANOPAGE_FUZZ_RANKS", "1x1,2x1,1x2,2x2").split(",")  # tensor x pipeline parallelism
WORLDS = int(os.environ.get("NANOPAGE_FUZZ_WORLDS", "20" if LONG else "12"))
MANY = WORLDS >= 20
TRITON_WORLDS = int(os.environ.get("NANOPAGE_FUZZ_TRITON_WORLDS", "2"))
GPU_WORLDS = int(os.environ.get("NANOPAGE_FUZZ_GPU_WORLDS", "8"))
SEED = int(os.environ.get("NANOPAGE_FUZZ_SEED", "0"))
MAX_LEN = 64
BLOCK_SIZES = (1, 2, 3, 4, 8, 16)
CONSTRAINTS = {  # what an output is held to, by an expression that it matches once it is complete
    "([a-z]{1,3} )*[0-9]?": {"regex": "([a-z]{1,3} )*[0-9]?"},
    "the cat|the dog|there": {"choice": ["the cat", "the dog", "there"]},
    "[xy()]*z": {"grammar": 'start: s* "z"\ns: "x" | "y" | "(" s* ")"'},
    r'\{"a":-?[0-9]+(,"b":(true|false|null))?\}': {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": [True, False, None]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    },
}

happened: Counter[str] = Counter()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("fuzz"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def oracle(model):
    return make_oracle(model)


def make_oracle(model, **options) -> LLMEngine:
    shape = build._read_config(EngineConfig(), model)
    num_kinds = len(divide_layers(shape.sliding_windows, MAX_LEN, shape.kv_sources).windows)
    block_size = options.get("block_size", MAX_LEN)
    return build_engine(
        EngineConfig(
            model=str(model),
            **{"dtype": "float64", "device": "cpu", "block_size": block_size} | options,
            max_model_len=MAX_LEN,
            num_gpu_blocks_override=num_kinds * MAX_LEN // block_size,  # no sequence is long enough to give one back
            max_num_seqs=1,
            enable_prefix_caching=False,
            enable_prompt_embeds=shape.model_impl == "nanopage"
            and not (shape.mixer.get("input_size") or shape.encoded_positions),
        )
    )


@dataclass
class Planned:
    """A request of a world: when it arrives, when (if ever) it is aborted, what came of it."""

    request_id: str
    prompt: dict
    params: SamplingParams | BeamSearchParams
    arrival: int
    abort_at: int | None
    abort_index: int | None = None  # only this completion
    priority: int = 0
    adapter: LoRARequest | None = None
    oracle: LLMEngine | None = None  # of the model with this adapter merged into its weights
    output: RequestOutput | None = None
    streamed: Counter[int] = field(default_factory=lambda: Counter())
    aborted: set[int] = field(default_factory=set)
    answers: dict = field(default_factory=dict)  # what the oracle said; shared between a plan's copies

    def again(self) -> "Planned":
        """The same request, for another engine."""
        same = {name: getattr(self, name) for name in ("request_id", "prompt", "params", "arrival", "abort_at")}
        added = {"adapter": self.adapter, "oracle": self.oracle}
        return Planned(**same, abort_index=self.abort_index, priority=self.priority, answers=self.answers, **added)

    @property
    def searches(self) -> bool:
        return isinstance(self.params, BeamSearchParams)

    def receive(self, output: RequestOutput) -> None:
        self.output = output
        if not self.searches and self.params.output_kind is RequestOutputKind.FINAL_ONLY:
            assert output.finished or self.aborted
        if not self.searches and not ranks(self.params):
            assert len(output.outputs) == self.params.n
            for completion in output.outputs:
                self.streamed[completion.index] = (self.streamed[completion.index] or "") + completion.delta
                assert self.streamed[completion.index] == completion.text


def ranks(params: SamplingParams) -> bool:
    """Whether completions compete, so that none has a place before all have ended."""
    return params.num_sequences > params.n


def draw_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    options: dict = {"max_tokens": rng.choice([1, 2, 5, 8, 12, 20, None]), "temperature": 0.0}
    ids = range(vocab_size)
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.3, 1.0, 2.5]), "seed": rng.randrange(100)}
        options |= rng.choice([{}, {"top_k": rng.choice([1, 3, 20])}, {"top_p": rng.random() or 0.5}, {"min_p": 0.05}])
        if rng.random() < 0.2:
            options |= {"top_k": 30, "top_p": 0.8, "min_p": 0.01}
    for chance, extra in (
        (0.2, {"repetition_penalty": rng.choice([0.8, 1.3])}),
        (0.2, {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}),
        (0.2, {"dry_multiplier": rng.choice([0.8, 5.0]), "dry_allowed_length": rng.choice([1, 1, 2, 4])}),
        (0.05, {"dry_sequence_breakers": rng.sample(["a", "e", "th", " ", "xyzzy"], rng.randrange(3))}),
        (0.15, {"logit_bias": {rng.choice(ids): rng.uniform(-20, 20) for _ in range(4)}}),
        (0.1, {"allowed_token_ids": rng.sample(ids, 40)}),
        (0.1, {"bad_words": rng.sample(["a", "the", "b c", "\n"], 2)}),
        (0.2, {"stop_token_ids": rng.sample(ids, 25)}),
        (0.2, {"stop": rng.sample(["a", "e", "th", "\n", "0", "é"], 3)}),
        (0.2, {"logprobs": rng.choice([0, 1, 5])}),
        (0.1, {"prompt_logprobs": rng.choice([0, 3])}),
        (0.3, {"ignore_eos": True}),
        (0.3, {"skip_special_tokens": False}),
        (0.3, {"include_stop_str_in_output": True}),
    ):
        if rng.random() < chance:
            options |= extra
    if options["temperature"] and rng.random() < 0.4:
        options["n"] = rng.choice([2, 3, 4, 8])
        options["max_tokens"] = rng.choice([2, 8, 12, 20])
        if rng.random() < 0.3:
            options["n"], options["best_of"] = rng.randint(1, options["n"]), options["n"]
    if rng.random() < 0.3:
        options["min_tokens"] = rng.randint(0, options["max_tokens"] or 6)
    if rng.random() < 0.25:
        options["structured_outputs"] = StructuredOutputsParams(**rng.choice([*CONSTRAINTS.values()]))
        for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos"):  # they could leave no token
            options.pop(name, None)
    return SamplingParams(**options)


def draw_search(rng: random.Random) -> BeamSearchParams:
    return BeamSearchParams(
        width=rng.choice([1, 2, 3, 4]),
        max_tokens=rng.choice([1, 3, 6, 9]),
        length_penalty=rng.choice([0.0, 1.0, 1.0, 2.0, -1.0]),
        early_stopping=rng.choice([False, True, "never"]),
    )


def draw_world(rng: random.Random, oracle: LLMEngine, block_sizes=BLOCK_SIZES) -> tuple[dict, list[Planned]]:
    vocab_size = oracle.model_config.vocab_size
    block_size = rng.choice(block_sizes)
    max_model_len = rng.randint(24, MAX_LEN)
    times, more = rng.choice([(1, 0), (1, 2), (2, 0), (3, 0)])
    options = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rng.choice([1, 2, 3, 8, 16]),
        "max_num_batched_tokens": rng.choice([1, 3, *[7, 16, 64, 256] * 3]),
        "enable_prefix_caching": rng.random() < 0.85,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "preemption_mode": rng.choice([None, None, "recompute", "swap", "swap"]),
        "enable_prompt_embeds": oracle.config.enable_prompt_embeds,
        "enable_prompt_adapter": oracle.config.enable_prompt_adapter,
    }
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], least_budget(oracle))
    blocks_of_one, size = measure_blocks(oracle, options)
    options["num_gpu_blocks_override"] = times * blocks_of_one + more
    if options["preemption_mode"] != "recompute":
        options["swap_space"] = rng.choice([0, 1, 3, blocks_of_one, 500]) * size / GIB
        if options["swap_space"] == 0:  # "swap" needs some
            options["preemption_mode"] = None
    prefixes = [[rng.randrange(vocab_size) for _ in range(max_model_len)] for _ in range(2)]
    salts = rng.choice([[""], [""], ["", "tenant"]])
    plans = []
    for i in range(rng.randint(2, 7)):
        length = rng.randint(1, max_model_len // rng.choice([1, 3]) - 2)
        shared = rng.choice([0, length // 2, length, length])
        own = [rng.randrange(vocab_size) for _ in range(length - shared)]
        prompt = {"prompt_token_ids": rng.choice(prefixes)[:shared] + own, "cache_salt": rng.choice(salts)}
        arrival = rng.choice([0, 0, rng.randrange(30)])
        abort_at = arrival + rng.randrange(25) if rng.random() < 0.15 else None
        params = draw_search(rng) if rng.random() < 0.2 else draw_params(rng, vocab_size)
        plan = Planned(str(i), prompt, params, arrival, abort_at)
        if not plan.searches and not ranks(params) and rng.random() < 0.5:
            plan.abort_index = rng.randrange(params.num_sequences)
        if not plan.searches and rng.random() < 0.3:
            params.output_kind = RequestOutputKind.FINAL_ONLY
        if options["scheduling_policy"] == "priority":
            plan.priority = rng.choice([-1, 0, 0, 1])
        plans.append(plan)
    put_items(oracle, plans, max_model_len)
    return options, plans


def put_items(oracle: LLMEngine, plans: list[Planned], max_model_len: int) -> None:
    """Give some prompts embeddings or images in the place of some tokens, the same ones as other prompts, or others. If
    the model has an encoder of text, give it a text for each."""
    rng = random.Random(repr([plan.prompt for plan in plans]))
    if oracle.model_config.encoded_positions:
        texts = [[rng.randrange(100) for _ in range(length)] for length in (1, 9, MAX_LEN)]
        for plan in plans:
            plan.prompt["encoder_prompt"] = TokenizedPrompt(None, rng.choice(texts))
    images = getattr(oracle, "images", [])
    if not oracle.config.enable_prompt_embeds or (not images and rng.random() < 0.5):
        return
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    contents = torch.randn(2, 16, oracle.model_config.hidden_size, dtype=torch.float64, generator=generator).numpy()
    places = sorted((rng.randrange(20), rng.randint(1, 16)) for _ in range(4 if images else 2))
    for plan in plans:
        items, end = [], 0
        for position, length in places:
            rows = rng.choice([contents[0], contents[0], contents[1]])[:length]
            item = make_item("embeds", position, len(rows), {"embeds": rows}, 3 * len(rows))
            if images and rng.random() < 0.7:
                item = replace(rng.choice(images), position=position)
            after = position + item.length
            if end <= position and after <= len(plan.prompt["prompt_token_ids"]) and rng.random() < 0.8:
                items.append(item)
                end = after
        if items:
            kinds = {item.kind for item in items}
            happened.update(f"prompts with {kind}" for kind in kinds)
            plan.prompt["multi_modal_data"] = items
            if not plan.searches and "embeds" in kinds:
                plan.params.prompt_logprobs = None
        soft = rng.choice([None, *oracle.soft_prompts]) if images else None
        room = max_model_len - len(plan.prompt["prompt_token_ids"])
        if soft is not None and soft.prompt_adapter_num_virtual_tokens < room:
            happened["prompts with soft prompts"] += 1
            plan.prompt["prompt_adapter_request"] = soft
            if not plan.searches:
                plan.params.prompt_logprobs = None


def least_budget(oracle: LLMEngine) -> int:
    """How many tokens a step must be able to have: those of an image that no step divides."""
    return max((image.length for image in getattr(oracle, "images", []) if image.whole), default=1)


def read_items(prompt: TokenizedPrompt, items: list[Item]) -> None:
    prompt.items += items


def measure_blocks(oracle: LLMEngine, options: dict) -> tuple[int, int]:
    """How many blocks the longest sequence takes, and how many bytes a block has."""
    shape = oracle.model_config
    kinds = divide_layers(shape.sliding_windows, options["max_model_len"], shape.kv_sources)
    needs = BlockNeeds(kinds.windows, options["block_size"], options["max_num_batched_tokens"])
    size = block_bytes(shape, options["block_size"], torch.float64, kinds.num_rows)
    return needs.of([options["max_model_len"]]), size


def press(rng: random.Random, oracle: LLMEngine, options: dict, plans: list[Planned], block_sizes=BLOCK_SIZES) -> None:
    """Make a world run out of blocks: prompts share most of their blocks, so that a small pool admits many at once, and
    then all of them grow. What windows give back would otherwise be enough."""
    small = [size for size in block_sizes if size <= 4]
    budget = max(rng.choice([5, 7, 16]), least_budget(oracle))
    options |= {"block_size": rng.choice(small), "max_num_batched_tokens": budget}
    blocks_of_one, size = measure_blocks(oracle, options)
    options |= {
        "num_gpu_blocks_override": blocks_of_one + rng.choice([0, 1]),
        "max_num_seqs": rng.choice([4, 8, 16]),
        "enable_prefix_caching": True,
        "preemption_mode": rng.choice([None, "swap", "swap", "swap"]),
        "swap_space": rng.choice([blocks_of_one, 500]) * size / GIB,
    }
    vocab_size, most = oracle.model_config.vocab_size, options["max_model_len"] // 2
    prefix = [rng.randrange(vocab_size) for _ in range(most)]
    del plans[5:]  # their oracles take long
    while len(plans) < 5:
        plans.append(replace(plans[0].again(), request_id=str(len(plans)), answers={}))
    for plan in plans:
        shared = rng.randint(most // 2, most)
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))]
        plan.prompt = {"prompt_token_ids": prefix[:shared] + own, "cache_salt": ""}
        arrival = rng.randrange(4)
        if plan.abort_at is not None:
            plan.abort_at += arrival - plan.arrival
        plan.arrival = arrival
        if not plan.searches:
            plan.params.max_tokens = rng.choice([20, None])
    put_items(oracle, plans, options["max_model_len"])


def watch(engine: LLMEngine) -> None:
    """Check every copy and swap bit for bit, and count them."""
    worker, manager, scheduler = engine.executor.worker, engine.scheduler.block_manager, engine.scheduler
    cache, launch, schedule, update = worker.kv_cache, worker.launch, scheduler.schedule, scheduler.update
    copy, swap_out, swap_in, fork = cache.copy, cache.swap_out, cache.swap_in, manager.fork
    swapped: dict[int, torch.Tensor] = {}

    def blocks(of):
        return [cache.movable[:, :, block].clone() for block in of]

    def checked_copy(pairs):
        before = blocks(source for source, _ in pairs)
        copy(pairs)
        assert all(map(torch.equal, before, blocks(target for _, target in pairs)))

    def checked_swap_out(pairs):
        swapped.update(zip((host for _, host in pairs), blocks(block for block, _ in pairs), strict=True))
        swap_out(pairs)

    def checked_swap_in(pairs):
        swap_in(pairs)
        assert all(map(torch.equal, (swapped[host] for host, _ in pairs), blocks(block for _, block in pairs)))

    def counted_fork(*ids):
        happened["forks"] += 1
        fork(*ids)

    def counted_launch(batch):
        happened["steps"] += 1
        return launch(batch)

    def counted_schedule():
        scheduled = schedule()
        happened["tokens read before they were known"] += sum(seq.num_in_flight for seq in scheduled.sequences)
        return scheduled

    def counted_update(scheduled, result):
        taken = update(scheduled, result)
        what = "samples of steps with drafts dropped" if scheduled.drafted else "tokens dropped"
        happened[what] += len(result.token_ids) - len(taken)
        return taken

    cache.copy, cache.swap_out, cache.swap_in, manager.fork = (
        checked_copy,
        checked_swap_out,
        checked_swap_in,
        counted_fork,
    )
    worker.launch, scheduler.schedule, scheduler.update = counted_launch, counted_schedule, counted_update


def run_as_on_a_gpu(engine: LLMEngine, uses_triton: bool = False) -> None:
    """Decodes on padded buffers, with what is captured there; other steps in pieces, on padded buffers if they have few
    tokens. All rows of a batch are sampled at once."""
    worker = engine.executor.worker
    runner = worker.runner
    sample_all = make_sample_all(uses_triton)
    make_attention = worker.setup.make_attention if uses_triton else None
    compiles = not why_not_compiled(worker.setup)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "compile_afresh", lambda function: function)
        model = pieces_for(worker.model, uses_triton) if compiles else worker.model
    made = model, worker.kv_cache, runner.table
    graphs, wrap = graphs_for(*made, uses_triton, sample_all), worker.wings.wrap
    runner.ways = [wrap(graphs), wrap(Eager(*made, make_attention))]
    runner.sampler.sample_all = sample_all
    count_steps(graphs, "steps on static buffers")
    if compiles:
        pieces = PiecewiseGraphs(*made, make_attention, most=engine.scheduler.token_budget.most // 2 + 1)
        runner.ways.insert(1, wrap(pieces))
        count_steps(pieces, "steps in pieces on static buffers")


def count_steps(way: CUDAGraphs | PiecewiseGraphs, what: str) -> None:
    """Count the steps that go a way."""
    run = way.run

    def counted_run(batch):
        happened[what] += 1
        return run(batch)

    way.run = counted_run


def add(engine: LLMEngine, plan: Planned) -> None:
    """With fewer completions if so many could never run."""
    engine.input_processor.prompts.item_readers["multi_modal_data"] = read_items
    while True:
        try:
            engine.add_request(plan.request_id, plan.prompt, plan.params, plan.priority, plan.adapter)
            return
        except ValueError as error:
            assert "max_num_seqs" in str(error) or "blocks" in str(error)
        if plan.searches:
            plan.params = replace(plan.params, width=plan.params.width - 1)
        else:
            plan.params = replace(plan.params, n=max(1, plan.params.num_sequences - 1), best_of=None)
            plan.abort_index = plan.abort_index and 0


def fail_at_times(engine: LLMEngine, rng: random.Random) -> None:
    """Some steps raise before they moved any blocks, when they have moved them, or when all is done."""
    worker = engine.executor.worker
    launch, swap_out, model = worker.launch, worker.kv_cache.swap_out, worker.model.forward
    culprit = None

    def failing(name, function, *arguments, **options):
        if culprit == name == "before":
            raise RuntimeError(name)
        result = function(*arguments, **options)
        if culprit == name:
            raise RuntimeError(name)
        return result

    def failing_launch(batch):
        nonlocal culprit
        fails = rng.random() < 0.1 and not engine.scheduler.queues.suspects
        culprit = rng.choice(["before", "moves", "model", "launch"]) if fails else None
        happened["steps that failed"] += culprit is not None
        happened["steps that failed with copies or swaps"] += culprit is not None and bool(
            batch.copies or batch.swap_out
        )
        return failing("before", failing, "launch", launch, batch)

    worker.launch = failing_launch
    worker.kv_cache.swap_out = partial(failing, "moves", swap_out)
    worker.model.forward = partial(failing, "model", model)


class Guesser:
    """Drafts good, bad and random tokens for the requests of a world, good ones also beyond a stop string."""

    def __init__(self, oracle: LLMEngine, plans: list[Planned], max_model_len: int, rng: random.Random):
        self.oracle, self.max_model_len, self.rng = oracle, max_model_len, rng
        self.by_id = {plan.request_id: plan for plan in plans}
        self.longer: dict[str, Planned] = {}  # the same requests without stop strings

    def propose(self, decodes, most, schedule):
        return {seq: draft for seq in decodes if (draft := self.guess(seq))}

    def guess(self, seq):
        rng, kind = self.rng, self.rng.choice(["good", "good", "bad", "random", "none"])
        if kind == "none":
            return []
        plan = self.by_id[seq.group.request_id]
        if plan.request_id not in self.longer:
            self.longer[plan.request_id] = replace(plan, params=replace(plan.params, stop=[]), answers={})
        answers = completions_alone(self.oracle, self.longer[plan.request_id], self.max_model_len)
        answer, known = answers[seq.group.seqs.index(seq)].outputs[0].token_ids, seq.output_token_ids
        assert known == answer[: len(known)]
        draft = answer[len(known) :] if kind != "random" else []
        draft += [rng.randrange(self.oracle.model_config.vocab_size) for _ in range(3)]
        if kind == "bad":
            place = rng.randrange(len(draft))
            draft[place] = (draft[place] + 1) % self.oracle.model_config.vocab_size
        return draft[: rng.randint(1, 8)]

    def learn(self, seq, num_drafted, num_accepted):
        happened["drafts"] += 1
        happened["tokens of drafts"] += num_drafted
        happened["tokens of drafts that were accepted"] += num_accepted
        happened["drafts that were accepted whole"] += num_drafted == num_accepted

    def observe(self, stats):
        happened["steps with drafts"] += stats.num_drafts > 0
        happened["steps with drafts and chunks of prompts"] += stats.num_drafts > 0 and stats.prefill_tokens > 0

    def rest(self):
        pass

    def restart(self):
        pass


def run_world(engine: LLMEngine, plans: list[Planned]) -> None:
    by_id = {plan.request_id: plan for plan in plans}
    manager, scheduler = engine.scheduler.block_manager, engine.scheduler
    if not isinstance(engine.executor, ProcessExecutor):
        watch(engine)
    states: dict[str, str] = {}  # of the requests, as the events tell
    step = 0
    plans_ahead = random.Random(len(plans))
    frames, picture = Frames(engine, "tiny"), Picture()
    picture.apply(frames.key())
    while engine.has_unfinished_requests() or any(plan.arrival >= step for plan in plans):
        if plans_ahead.random() < 0.3:  # requests arrive, and are aborted, between the decision and the step
            engine.plan()
            picture.apply(frames.plan())
        for plan in plans:
            if plan.arrival == step:
                add(engine, plan)
            if plan.abort_at == step and (output := engine.abort(plan.request_id, plan.abort_index)):
                whole = plan.abort_index is None
                plan.aborted |= set(range(8)) if whole else {plan.abort_index}
                plan.receive(output)
        for output in engine.step():
            assert output.error is None
            by_id[output.request_id].receive(output)
        check_blocks(manager)
        check_queues(scheduler)
        stats = engine.last_step
        follow(states, stats.events)
        check_sentences(engine)
        picture.apply(frame := frames.step(stats))
        check_picture(picture, Frames(engine, "tiny"))
        happened["key frames"] += frame["frame"] == "key"
        assert states == {
            group.request_id: group.status.value
            for queue in (scheduler.waiting, scheduler.running, scheduler.swapped)
            for group in queue
        }
        assert stats.used_blocks + stats.free_blocks + stats.cached_blocks == manager.num_blocks
        happened["copies"] += stats.copied
        happened["blocks swapped out"] += stats.swapped_out
        happened["blocks swapped in"] += stats.swapped_in
        step += 1
        assert step < 5000, "no progress"
    assert manager.num_free_blocks == manager.num_blocks
    assert len(manager.host.free_blocks) == manager.host.num_blocks


def follow(states: dict[str, str], events: list[RequestEvent]) -> None:
    """Apply events to the states of requests. Each must be possible where it happens."""
    changes = {
        "added": (None, "waiting"),
        "started": ("waiting", "running"),
        "preempted": ("running", "waiting"),
        "swapped out": ("running", "swapped"),
        "swapped in": ("swapped", "running"),
    }
    for event in events:
        happened[f"requests {event.kind}"] += 1
        state = states.pop(event.request_id, None)
        if event.kind == "finished":
            assert state is not None
            continue
        before, after = changes[event.kind]
        assert state == before or (event.kind == "preempted" and state == "swapped")  # by a failed step
        states[event.request_id] = after


SENTENCES = {
    "added": "add",
    "started": "admit",
    "preempted": "preempt",
    "swapped out": "swap out",
    "swapped in": "swap in",
    "finished": "finish",
}


def check_sentences(engine: LLMEngine) -> None:
    """Each decision of the last step has a sentence, and no other has."""
    last, scheduler = engine.last, engine.scheduler
    sentences = make_sentences(engine)
    expected = Counter((SENTENCES[event.kind], event.request_id) for event in last.stats.events)
    assert Counter((s.kind, s.request_id) for s in sentences if s.kind in SENTENCES.values()) == expected
    kinds = Counter(s.kind for s in sentences)
    schedule = last.scheduled
    if schedule is not None:
        assert kinds["copy"] == len(schedule.batch.copies) and kinds["run"] == 1
        told_blocks = [int(number) for s in sentences if s.kind == "evict" for number in re.findall(r"\d+", s.text)]
        evicted = {block for (blocks,) in told(schedule, "evicted") for block in blocks}
        assert len(evicted) > 8 or evicted <= set(told_blocks)
        stopped = [group for group in (*scheduler.waiting, *scheduler.swapped) if group.status.value != "finished"]
        waits = [s for s in sentences if s.kind == "wait"]
        arrived = {event.request_id for event in last.stats.events if event.kind == "added"}
        assert waits or all(group.request_id in arrived or group.last_event == "preempted" for group in stopped)
    beams = [about for batch in last.completed for about in told(batch, "beams")]
    forked = 0 if schedule is None else len(told(schedule, "forked"))
    assert kinds["fork"] == sum(len(forks) for _, forks in beams) + forked
    drops = sum(len(told(batch, "dropped")) for batch in last.completed) + sum(len(ending) for ending, _ in beams)
    refused = sum(
        len(draft) > accepted
        for batch in last.completed
        for (_, draft), accepted in zip(batch.drafted, batch.num_accepted, strict=True)
    )
    assert kinds["drop"] == drops + refused
    happened.update(f"sentences: {kind}" for kind in kinds)


def check_picture(picture: Picture, frames: Frames) -> None:
    """The picture that step frames have made is that of the whole state."""
    whole = Picture()
    whole.apply(frames.key())
    assert {seq: blocks for seq, (_, blocks) in picture.tables.items()} == {
        seq: blocks for seq, (_, blocks) in whole.tables.items()
    }
    assert {seq: blocks for seq, (_, blocks) in picture.host.items()} == {
        seq: blocks for seq, (_, blocks) in whole.host.items()
    }
    assert picture.cached == whole.cached

    def told(shown: Picture) -> list[list[tuple]]:
        requests = [[shown.requests[number] for number in queue] for queue in shown.queues]
        return [
            [(r.prompt, r.completions, r.priority, r.tokens, r.computed, r.preemptions) for r in queue]
            for queue in requests
        ]

    assert told(picture) == told(whole)


def check_queues(scheduler) -> None:
    manager = scheduler.block_manager
    for queue in (scheduler.waiting, scheduler.running, scheduler.swapped):
        assert [(g.priority, g.order) for g in queue] == sorted((g.priority, g.order) for g in queue)
    ids = {seq.seq_id for group in scheduler.running for seq in (group.live if group.forked else group.live[:1])}
    assert manager.block_tables.keys() == ids
    ids = {seq.seq_id for group in scheduler.swapped for seq in (group.live if group.forked else group.live[:1])}
    assert manager.host.tables.keys() == ids
    assert sum(group.num_unfinished for group in scheduler.running) <= scheduler.admission.max_num_seqs
    assert all(seq.num_computed_tokens == 0 for group in scheduler.waiting for seq in group.live)


def run_alone(oracle: LLMEngine, prompt: dict, params: SamplingParams, max_model_len: int) -> RequestOutput:
    oracle.input_processor.prompts.item_readers["multi_modal_data"] = read_items
    request = oracle.input_processor.make_request("alone", prompt, params)
    (seq,) = request.group.seqs
    seq.max_total_tokens = min(seq.max_total_tokens, max_model_len)
    oracle.submit(request)
    while True:
        for output in oracle.step():
            if output.finished:
                return output


def completions_alone(oracle: LLMEngine, plan: Planned, max_model_len: int) -> list[RequestOutput]:
    """Each completion as a request of its own."""
    count = plan.params.num_sequences
    if count not in plan.answers:
        plan.answers[count] = _completions_alone(plan.oracle or oracle, plan, max_model_len)
    return plan.answers[count]


def _completions_alone(oracle: LLMEngine, plan: Planned, max_model_len: int) -> list[RequestOutput]:
    params = replace(plan.params, n=1, best_of=None)
    if ranks(plan.params) and params.logprobs is None:
        params.logprobs = 0
    outputs = []
    for index in range(plan.params.num_sequences):
        if index:
            params.seed = branch_seed(plan.params.seed, index)
        outputs.append(run_alone(oracle, plan.prompt, params, max_model_len))
    return outputs


def search_alone(oracle: LLMEngine, plan: Planned, max_model_len: int) -> BeamSearch:
    """Beam search in which every beam of every step is a prompt of its own."""
    width = plan.params.width
    if width not in plan.answers:
        plan.answers[width] = _search_alone(plan.oracle or oracle, plan, max_model_len)
    return plan.answers[width]


def num_soft_tokens(prompt: dict) -> int:
    soft = prompt.get("prompt_adapter_request")
    return 0 if soft is None else soft.prompt_adapter_num_virtual_tokens


def _search_alone(oracle: LLMEngine, plan: Planned, max_model_len: int) -> BeamSearch:
    prompt, params = plan.prompt["prompt_token_ids"], plan.params
    search = BeamSearch(
        params.width,
        min(params.max_tokens, max_model_len - len(prompt) - num_soft_tokens(plan.prompt)),
        params.length_penalty,
        params.early_stopping,
        oracle.model_config.eos_token_ids,
    )
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=search.num_candidates, detokenize=False)
    beams = [Beam([], 0.0, {})]
    while True:
        for beam in beams:
            longer = plan.prompt | {"prompt_token_ids": prompt + beam.token_ids}
            output = run_alone(oracle, longer, ask, MAX_LEN)
            beam.candidates = {token: p.logprob for token, p in output.outputs[0].logprobs[0].items()}
        chosen = search.choose(beams)
        search.accept(chosen)
        if search.finished:
            return search
        beams = [Beam([*beams[i].token_ids, token], cumulative, {}) for i, token, cumulative in chosen.live]


def tolerance_of(oracle: LLMEngine) -> float:
    return 0 if oracle.config.batch_invariant else 1e-9


def assert_same_tables(ours, theirs, tolerance):
    """Log-probabilities of the same tokens, with the same ranks and texts."""
    assert (ours is None) == (theirs is None)
    for one, other in zip(ours or [], theirs or [], strict=True):
        assert (one is None) == (other is None)
        for (token, got), (wanted, expected) in zip((one or {}).items(), (other or {}).items(), strict=True):
            assert (token, got.rank, got.decoded_token) == (wanted, expected.rank, expected.decoded_token)
            assert got.logprob == pytest.approx(expected.logprob, abs=tolerance)


def check_search(oracle: LLMEngine, plan: Planned, max_model_len: int) -> None:
    if plan.aborted:
        assert all(completion.finish_reason for completion in plan.output.outputs)
        return
    search, tolerance = search_alone(oracle, plan, max_model_len), tolerance_of(oracle)
    assert [c.token_ids for c in plan.output.outputs] == [h.token_ids for h in search.hypotheses]
    for completion, hypothesis in zip(plan.output.outputs, search.hypotheses, strict=True):
        assert completion.score == pytest.approx(hypothesis.score, abs=tolerance)
        assert completion.cumulative_logprob == pytest.approx(hypothesis.cumulative_logprob, abs=tolerance)
        assert completion.finish_reason == hypothesis.finish_reason


def check_constraint(oracle: LLMEngine, plan: Planned) -> None:
    """The text of a completion that end-of-sequence has ended is what was asked for."""
    structured = plan.params.structured_outputs
    (pattern,) = (p for p, options in CONSTRAINTS.items() if StructuredOutputsParams(**options) == structured)
    for completion in plan.output.outputs:
        happened["constrained completions"] += 1
        if (completion.finish_reason, completion.stop_reason) == ("stop", None):
            happened["constrained completions that were complete"] += 1
            assert re.fullmatch(pattern, oracle.tokenizer.decode(completion.token_ids[:-1]))


def check_completions(oracle: LLMEngine, plan: Planned, max_model_len: int) -> None:
    if plan.params.structured_outputs is not None:
        check_constraint(oracle, plan)
    alone = completions_alone(oracle, plan, max_model_len)
    if ranks(plan.params):
        if plan.aborted:  # who is ranked first depends on how far they came
            everything = [output.outputs[0].token_ids for output in alone]
            for completion in plan.output.outputs:
                n = len(completion.token_ids)
                assert any(completion.token_ids == token_ids[:n] for token_ids in everything)
            return
        alone = sorted(alone, key=lambda output: -output.outputs[0].cumulative_logprob)[: plan.params.n]
    assert len(plan.output.outputs) == len(alone)
    for index, (completion, output) in enumerate(zip(plan.output.outputs, alone, strict=True)):
        expected = output.outputs[0]
        assert completion.index == index
        if index in plan.aborted and completion.finish_reason == "abort":
            assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
            # A character that is not complete, and the beginning of a stop string, may have become something else.
            text, stops = completion.text.rstrip("\ufffd"), plan.params.stop or []
            begun = [stop[:size] for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
            text = text.removesuffix(max(begun, key=len, default=""))
            assert text == expected.text[: len(text)]
            continue
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text
        assert (completion.finish_reason, completion.stop_reason) == (expected.finish_reason, expected.stop_reason)
        if plan.params.logprobs is not None:
            assert_same_tables(completion.logprobs, expected.logprobs, tolerance_of(oracle))
        if plan.output.prompt_logprobs is not None:
            assert len(plan.output.prompt_logprobs) == len(plan.prompt["prompt_token_ids"])
        if plan.output.prompt_logprobs is not None or not plan.aborted:
            assert_same_tables(plan.output.prompt_logprobs, output.prompt_logprobs, tolerance_of(oracle))


@pytest.mark.interpreter
@pytest.mark.parametrize("world", range(TRITON_WORLDS))
def test_nor_do_the_triton_kernels(world, model, oracle, monkeypatch):
    """The same with attention by Triton's kernels, in the interpreter: decodes in splits of a tile or two."""
    rng = random.Random(f"triton-{SEED}-{world}")
    options, plans = draw_world(rng, oracle, block_sizes=(1, 2, 4, 8, 16))
    if not LONG:
        del plans[2:]  # the interpreter takes long
    with monkeypatch.context() as patch:
        patch.setattr(paged_attention, "num_processors", lambda device: rng.choice([1, 8, 32]))
        patch.setattr(paged_attention, "TILE_BYTES", 1)
        patch.setattr(paged_attention, "SPLIT_TOKENS", 8)
        patch.setattr(paged_attention, "PROMPT_SPLIT_TOKENS", 8)
        options["async_scheduling"] = world % 2 == 0
        engine = build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", **options))
        run_as_on_a_gpu(engine, uses_triton=True)
        if not engine.async_scheduling:
            engine.scheduler.drafts = Drafts(Guesser(oracle, plans, options["max_model_len"], rng))
        run_world(engine, plans)
    for plan in plans:
        check = check_search if plan.searches else check_completions
        check(oracle, plan, options["max_model_len"])


@pytest.mark.parametrize("world", range(-(-WORLDS // 10)))
def test_nor_does_a_cache_in_fp8(world, model):
    """K and V are rounded to 8 bits, one token like another: the answer is the oracle's if it rounds them, too."""
    fp8 = {"kv_cache_dtype": "fp8", "enforce_eager": True}
    rng = random.Random(f"fp8-{SEED}-{world}")
    engine = check_world(model, make_oracle(model, **fp8), world, rng, as_on_a_gpu=world % 3 > 0, **fp8)
    assert engine.executor.worker.kv_cache.tensor.dtype == torch.float8_e4m3fn


def check_world(
    model, oracle, world, rng, as_on_a_gpu, fails=False, pressed=False, prepare=None, block_sizes=BLOCK_SIZES, **fixed
):
    """Run a random world on a model, and compare it with the oracle. Returns the engine.

    Args: fails: whether steps fail; pressed: whether blocks run out; prepare: called with the engine; fixed: options of
        both the engine and the oracle.
    """
    options, plans = draw_world(rng, oracle, block_sizes)
    if pressed:
        press(rng, oracle, options, plans, block_sizes)
    options["async_scheduling"] = world % 2 == 0
    engine = build_engine(EngineConfig(**{"model": str(model), "dtype": "float64", "device": "cpu"} | options | fixed))
    if as_on_a_gpu:
        run_as_on_a_gpu(engine)
    if fails:
        fail_at_times(engine, rng)
    if prepare is not None:
        prepare(engine)
    if not engine.async_scheduling:
        engine.scheduler.drafts = Drafts(Guesser(oracle, plans, options["max_model_len"], rng))
    run_world(engine, plans)
    for plan in plans:
        check = check_search if plan.searches else check_completions
        check(oracle, plan, options["max_model_len"])
    return engine


# Each dtype compiles its own layers, which takes 45 seconds.
compiles_layers = pytest.mark.skipif(not (LONG or MANY), reason="NANOPAGE_LONG_TESTS=1 compiles")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def invariant(request, tmp_path_factory, worker_id):
    """Options with `batch_invariant`, and a model with two layers of the default model's sizes. Its layers are compiled
    once for a dtype, and every process of a run loads them."""
    dtype, base = request.param, tmp_path_factory.getbasetemp()
    if not computes_natively(dtype, torch.device("cpu")):
        pytest.skip(f"this CPU does not compute in {dtype}")
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = tiny_model(tmp_path_factory.mktemp("fuzz"), num_hidden_layers=2, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base if worker_id == "master" else base.parent))
        patch.delenv("NANOPAGE_COMPILE", raising=False)
        yield model, {"dtype": dtype, "batch_invariant": True}


@compiles_layers
@pytest.mark.parametrize("world", range(WORLDS if MANY else 3))
def test_nor_does_rounding(world, invariant, monkeypatch):
    """To the bit. Blocks of 4 tokens, for which other layers are compiled, are too small to be read in place."""
    monkeypatch.setattr("nanopage.sampling.truncation.CANDIDATES", 4)
    model, fixed = invariant
    rng = random.Random(f"rounding-{SEED}-{world}")
    how = {"pressed": MANY and world % 3 == 0, "block_sizes": (4, 16) if MANY else (16,), "fails": world % 2 > 0}
    engine = check_world(model, make_oracle(model, **fixed, block_size=16), world, rng, False, **how, **fixed)
    happened["worlds to the bit"] += 1
    happened["worlds to the bit that preempted"] += engine.scheduler.queues.num_preemptions > 0


@compiles_layers
def test_rows_do_not_depend_on_the_rows_beside_them(invariant):
    """The logits of a prompt, whatever the size of its chunks."""
    model, fixed = invariant
    prompt, params = (
        {"prompt_token_ids": [*range(3, 43)]},
        SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=5),
    )
    seen = []
    for size in range(1, 41, 3):
        options = {"max_num_batched_tokens": size, "max_num_seqs": 1, "max_model_len": MAX_LEN, "block_size": 16}
        engine = build_engine(EngineConfig(model=str(model), device="cpu", **fixed, **options))
        output = run_alone(engine, prompt, params, MAX_LEN)
        seen.append((output.prompt_logprobs, output.outputs[0].token_ids))
    assert all(each == seen[0] for each in seen)


GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 6,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Models whose layers have windows, shorter than most contexts, and their oracles: with two layers without a window
    and one with one, and the ropes of each; with four in turns; only with windows; with sinks and experts; with heads
    of two sizes, and layers that share K and V."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    families = [
        ("gemma3_text", {"sliding_window": 6, "num_hidden_layers": 3, "sliding_window_pattern": 2}),
        ("gemma2", {"sliding_window": 13, "num_hidden_layers": 4}),
        ("mistral", {"sliding_window": 5, "num_hidden_layers": 2}),
        ("gpt_oss", {"sliding_window": 7, "num_hidden_layers": 2, "num_local_experts": 3}),
        ("gemma4_text", GEMMA4),
    ]
    made = []
    for family, windows in families:
        model = tiny_model(tmp_path_factory.mktemp(family), family, **sizes, **windows)
        made.append((model, make_oracle(model)))
    return made


@pytest.fixture(scope="module")
def on_a_gpu(model, windowed):
    """Models, and their oracles on a GPU: Triton takes the scale of scores as a float32 there, whatever the dtype."""
    how = {"device": "cuda", "enforce_eager": True}
    return [(path, make_oracle(path, **how)) for path in (model, *(path for path, _ in windowed[:3]))]


@pytest.mark.gpu
@pytest.mark.parametrize("world", range(GPU_WORLDS))
def test_nor_does_a_gpu(world, on_a_gpu):
    """Every fourth world compiles and captures."""
    rng = random.Random(f"gpu-{SEED}-{world}")
    how = {"fails": world % 5 == 1, "pressed": world % 5 == 2, "block_sizes": (1, 2, 4, 8, 16)}
    model, oracle = on_a_gpu[rng.choice([0, 0, 1, 2, 3])]
    check_world(model, oracle, world, rng, False, **how, device="cuda", enforce_eager=world % 4 > 0)


def poison_free_blocks(engine: LLMEngine) -> None:
    """Whoever reads a block that has been given back, and not been given out again, gets NaN."""
    manager, cache = engine.scheduler.block_manager, engine.executor.worker.kv_cache
    engine.listeners.append(lambda stats: cache.tensor.index_fill_(2, torch.tensor(manager._free).long(), torch.nan))


@pytest.mark.parametrize("world", range(-(-WORLDS // 4)))
def test_nor_do_windows(world, windowed):
    """Blocks behind all windows are given back. Prefixes are found without them."""
    rng = random.Random(f"windows-{SEED}-{world}")
    model, oracle = windowed[(world + world // 5) % 5]
    how = {"as_on_a_gpu": world % 4 > 1, "fails": rng.random() < 0.4, "pressed": world % 5 > 0}
    engine = check_world(model, oracle, world, rng, **how, prepare=poison_free_blocks)
    manager = engine.scheduler.block_manager
    shape = oracle.model_config
    kinds = divide_layers(shape.sliding_windows, engine.max_model_len, shape.kv_sources)
    assert manager.windows == kinds.windows and any(manager.windows)
    happened["worlds with windows that preempted"] += engine.scheduler.queues.num_preemptions > 0
    happened["worlds with windows that swapped"] += engine.executor.worker.kv_cache.host is not None
    happened["worlds with windows and prefix-cache hits"] += manager.num_hit_tokens > 0


@pytest.fixture(scope="module")
def with_states(tmp_path_factory):
    """Models with layers that keep a state, and their oracles: LFM2's convolutions in some layers, or in all of them;
    Mamba-2's matrices."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "pad_token_id": None}
    experts = {"hidden_size": 32, "intermediate_size": 48, "mlp_only_layers": [0]}
    model = tiny_model(tmp_path_factory.mktemp("qwen3_next"), "qwen3_next", **experts)
    made = [(model, make_oracle(model))]
    for kinds in (["conv", "full_attention", "conv", "conv"], ["conv", "conv"]):
        directory = tmp_path_factory.mktemp("lfm2")
        model = tiny_model(directory, "lfm2", **sizes, layer_types=kinds, num_hidden_layers=len(kinds))
        made.append((model, make_oracle(model)))
    sizes = {"hidden_size": 16, "intermediate_size": 48, "mamba_n_heads": 4, "mamba_d_state": 4, "mamba_n_groups": 1}
    model = tiny_model(tmp_path_factory.mktemp("granite"), "granitemoehybrid", **sizes)
    return [*made, (model, make_oracle(model))]


@pytest.mark.parametrize("world", range(-(-WORLDS // 4)))
def test_nor_do_states(world, with_states):
    """A state goes on from where the last step has ended, and is found at the ends of prefixes."""
    rng = random.Random(f"states-{SEED}-{world}")
    how = {"fails": rng.random() < 0.4, "pressed": world % 5 > 0}
    engine = check_world(*with_states[world % len(with_states)], world, rng, False, **how, prepare=poison_free_blocks)
    happened["worlds with states that preempted"] += engine.scheduler.queues.num_preemptions > 0
    happened["worlds with states that swapped"] += engine.executor.worker.kv_cache.host is not None
    happened["worlds with states and prefix-cache hits"] += engine.scheduler.block_manager.num_hit_tokens > 0


def read_both_parts(engine: LLMEngine) -> None:
    """Take prompts of the decoder that have `encoder_prompt`, read already."""
    engine.input_processor.prompts = engine.input_processor.prompts.decoder


@pytest.fixture(scope="module")
def with_encoders(tmp_path_factory):
    """Encoder-decoder models, and their oracles."""
    made = []
    for hf_model in (tiny_bart(max_position_embeddings=MAX_LEN), tiny_t5(n_positions=MAX_LEN)):
        hf_model.save_pretrained(directory := tmp_path_factory.mktemp("encoder"))
        save_tokenizer(directory)
        made.append((directory, make_oracle(directory)))
        read_both_parts(made[-1][1])
    return made


@pytest.mark.parametrize("world", range(-(-WORLDS // 6)))
def test_nor_do_encoders(world, with_encoders):
    """A sequence attends to what its own encoder has read, wherever its blocks go."""
    rng = random.Random(f"encoders-{SEED}-{world}")

    def prepare(engine):
        read_both_parts(engine)
        poison_free_blocks(engine)

    how = {"fails": rng.random() < 0.4, "prepare": prepare, "block_sizes": (256,)}  # a block holds a sequence
    check_world(*with_encoders[world % 2], world, rng, False, **how)


SQUARE = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}  # 4 tokens
LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SEEING = {  # how a model is saved, and the sizes of images
    "SmolVLM": (partial(idefics_model, preprocessor=SQUARE), [(16, 16)] * 4),
    "Gemma 3": (partial(gemma_model, text=LAYERS), [(24, 24)] * 4),
    "Qwen2.5-VL": (qwen_model, [(24, 16), (24, 16), (24, 16), (16, 40)]),
}


@pytest.fixture(scope="module")
def with_images(tmp_path_factory):
    """Models that see images, and their oracles: a square is an item; the tokens of an image see each other; images of
    several sizes, whose tokens have positions of three axes. The oracles have images and soft prompts."""
    made = []
    for save, sizes in SEEING.values():
        save(directory := tmp_path_factory.mktemp("images"))
        oracle = make_oracle(directory, enable_prompt_adapter=True)
        reader = oracle.input_processor.prompts.item_readers["multi_modal_data"]
        images = [reader._prepare(picture(*size, seed))[1][0] for seed, size in enumerate(sizes)]
        oracle.images = [replace(image, cost=2) for image in images]  # so that several may begin in a step
        oracle.soft_prompts = [save_soft_prompt(directory / str(size), size) for size in (2, 5)]
        made.append((directory, oracle))
    return made


def save_soft_prompt(directory, size: int) -> PromptAdapterRequest:
    directory.mkdir()
    rows = torch.randn(size, 64, generator=torch.Generator().manual_seed(size))
    save_file({"prompt_embeddings": rows}, directory / "adapter_model.safetensors")
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": size}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return PromptAdapterRequest(str(size), size, str(directory), size)


@pytest.mark.parametrize("world", range(-(-WORLDS // 4)))
def test_nor_do_images(world, with_images):
    """Beside text, embeddings and soft prompts. The encoder's cache is often too small, and the encoder may fail."""
    rng = random.Random(f"images-{SEED}-{world}")

    def prepare(engine):
        poison_free_blocks(engine)
        rows = engine.executor.worker.wings.items
        rows.most_bytes, encode = rng.choice([0, 3000, rows.most_bytes]), rows.encoders["image"]

        def failing_encode(payload):
            happened["images encoded"] += len(payload["pixels"])
            happened["images encoded together"] += len(payload["pixels"]) > 1
            if rng.random() < 0.1 and not engine.scheduler.queues.suspects:
                happened["encoders that failed"] += 1
                raise RuntimeError("the encoder fails")
            return encode(payload)

        rows.encoders = {"image": failing_encode}
        if world % 5 > 2:
            engine.executor = BytesExecutor(engine.executor)

    how = {"as_on_a_gpu": world % 4 > 1, "fails": rng.random() < 0.3, "pressed": world // 3 % 2 > 0}
    engine = check_world(*with_images[world % 3], world, rng, **how, prepare=prepare)
    happened["images found in the encoder cache"] += engine.executor.worker.wings.items.cache.hits
    happened["worlds with images that preempted"] += engine.scheduler.queues.num_preemptions > 0
    happened["worlds with images that swapped"] += engine.executor.worker.kv_cache.host is not None
    happened["worlds with images and prefix-cache hits"] += engine.scheduler.block_manager.num_hit_tokens > 0


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    """Models with experts, the first one with pages of latent vectors, and their oracles."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 8}
    made = []
    for family, fields in (
        ("deepseek_v3", {}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 2}),
    ):
        model = tiny_model(tmp_path_factory.mktemp("fuzz"), family, **sizes, **fields)
        made.append((model, make_oracle(model)))
    return made


@pytest.mark.parametrize("world", range(-(-WORLDS // 10)))
def test_nor_do_experts(world, with_experts):
    """A token's experts do not depend on the tokens beside it. Latent vectors are shared, copied and swapped as K and V
    are."""
    rng = random.Random(f"experts-{SEED}-{world}")
    how = {"pressed": world % 3 == 0, "prepare": poison_free_blocks}
    check_world(*with_experts[world % 2], world, rng, False, **how)


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory):
    """Models that transformers' modules compute, one with windows and one with learned positions, and their oracles."""
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    windows = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    made = []
    for kind, fields in (("cohere2", windows), ("gpt2", {"n_positions": 128})):
        model = tiny_model(tmp_path_factory.mktemp(kind), kind, **sizes, **fields)
        made.append((model, make_oracle(model)))
    return made


@pytest.mark.parametrize("world", range(-(-WORLDS // 10)))
def test_nor_do_modules_of_transformers(world, of_transformers):
    """Decodes on padded buffers, too, in every other pair of worlds."""
    rng = random.Random(f"transformers-{SEED}-{world}")
    how = {"as_on_a_gpu": world % 4 > 1, "fails": rng.random() < 0.3, "pressed": world % 3 > 0}
    check_world(*of_transformers[world % 2], world, rng, **how)


@pytest.fixture(scope="module")
def adapted(model, tmp_path_factory):
    """Adapters, each with an oracle that has the same product in its weights. None: without an adapter."""
    made: list[tuple[LoRARequest | None, LLMEngine | None]] = [(None, None)]
    for index, rank in enumerate((1, 4, 8)):
        path = save_adapter(tmp_path_factory.mktemp("fuzz") / "adapter", model, rank=rank, seed=index)
        merged = shutil.copytree(model, path / "merged")
        weights, added = load_file(merged / "model.safetensors"), load_file(path / "adapter_model.safetensors")
        for name in weights:
            place = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{place}A.weight" in added:
                product = added[f"{place}B.weight"].double() @ added[f"{place}A.weight"].double()
                weights[name] = weights[name].double() + 8.0 / rank * product
        save_file(weights, merged / "model.safetensors")
        made.append((LoRARequest(str(index), index + 1, str(path)), make_oracle(merged)))
    return made


@pytest.mark.parametrize("world", range(-(-WORLDS // 5)))
def test_nor_do_adapters(world, model, oracle, adapted):
    """Requests with different adapters share batches, slots and nothing else."""
    rng = random.Random(f"adapters-{SEED}-{world}")
    options, plans = draw_world(rng, oracle)
    options |= {"enable_lora": True, "max_loras": rng.choice([1, 2, 3]), "max_lora_rank": 8, "enforce_eager": True}
    options["async_scheduling"] = world % 2 == 0
    for plan in plans:
        plan.adapter, plan.oracle = rng.choice(adapted)
    engine = build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", **options))
    runner = engine.executor.worker.runner
    if world % 3 == 1:
        engine.executor = BytesExecutor(engine.executor)
    if world % 3:  # what a GPU captures
        graphs = graphs_for(runner.model, runner.kv_cache, runner.table)
        count_steps(graphs, "steps on static buffers")
        runner.ways = [graphs, *runner.ways]
    if world % 4 == 0:
        fail_at_times(engine, rng)
    if not engine.async_scheduling:
        engine.scheduler.drafts = Drafts(Guesser(oracle, plans, options["max_model_len"], rng))
    slots = engine.scheduler.adapter_slots
    take = slots.take

    def counted_take(group, running, schedule):
        before = len(schedule.loading)
        take(group, running, schedule)
        if group.adapter is not None:
            happened["adapters loaded"] += len(schedule.loading) - before
            happened["adapters found in their slots"] += len(schedule.loading) == before
        assert len({*slots.held.values()}) == len(slots.held) <= options["max_loras"]

    slots.take = counted_take
    run_world(engine, plans)
    for plan in plans:
        check = check_search if plan.searches else check_completions
        check(oracle, plan, options["max_model_len"])


def fail_between_processes(engine: LLMEngine, rng: random.Random) -> None:
    """Some steps raise before a batch is sent, when it has been sent, or when its result has come."""
    executor = engine.executor
    submit, result = executor.submit, executor.result

    def failing(function, *arguments):
        fails = rng.random() < 0.05 and not engine.scheduler.queues.suspects
        happened["steps of several workers that failed"] += fails
        if fails and rng.random() < 0.5:
            raise RuntimeError("before")
        returned = function(*arguments)
        if fails:
            raise RuntimeError("after")
        return returned

    executor.submit, executor.result = partial(failing, submit), partial(failing, result)


def run_until_killed(engine: LLMEngine, plans: list[Planned], rng: random.Random) -> None:
    """Kill a worker at a random step. Every request that has not finished ends with an error that names its rank."""
    for plan in plans:
        add(engine, plan)
    victim, last_step = rng.randrange(len(engine.executor.links)), rng.randrange(12)
    outputs = []
    for step in range(1000):
        if step == last_step:
            engine.executor.links[victim].kill()
        outputs += engine.step()
        if not engine.has_unfinished_requests():
            break
    finished = {output.request_id: output for output in outputs if output.finished}
    assert finished.keys() == {plan.request_id for plan in plans}
    errors = {output.error for output in finished.values()} - {None}
    assert all(f"rank {victim} of" in error and "SIGKILL" in error for error in errors)
    if errors:
        happened["worlds whose worker was killed"] += 1
        with pytest.raises(WorkerDiedError, match=f"rank {victim} of"):
            engine.add_request("late", plans[0].prompt, plans[0].params)


# A worker is killed in the second world: without NANOPAGE_LONG_TESTS=1, only one of two.
@pytest.mark.parametrize(
    ("ranks", "world"), dict.fromkeys([*product(RANKS, range(RANK_WORLDS)), ("2x1", 1)]), ids=lambda value: str(value)
)
def test_nor_do_several_workers(ranks, world, model, oracle, windowed, monkeypatch, one_thread):
    """The same with the model divided among processes, which torch.distributed connects."""
    if world % 3 == 2:
        model, oracle = windowed[world // 3 % 4]
    tp_size, pp_size = map(int, ranks.split("x"))
    monkeypatch.setattr("nanopage.distributed.process_executor.ProcessLink", ForkedLink)
    rng = random.Random(f"{ranks}-{SEED}-{world}")
    options, plans = draw_world(rng, oracle)
    options |= {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size, "enforce_eager": True}
    options |= {"distributed_executor_backend": "mp", "async_scheduling": ranks == "1x1" and world % 3 > 0}

    def build() -> LLMEngine:
        return build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", **options))

    if world % 5 == 1:
        engine = build()
        try:
            run_until_killed(engine, [plan.again() for plan in plans], rng)
        finally:
            engine.shutdown()
    engine = build()
    try:
        if world % 2:
            fail_between_processes(engine, rng)
        if pp_size == 1 and not engine.async_scheduling and world % 4 != 1:
            engine.scheduler.drafts = Drafts(Guesser(oracle, plans, options["max_model_len"], rng))
        run_world(engine, plans)
    finally:
        engine.shutdown()
    assert all(link.ended() for link in engine.executor.links)
    for plan in plans:
        check = check_search if plan.searches else check_completions
        check(oracle, plan, options["max_model_len"])
    happened["worlds of several workers"] += 1


@pytest.fixture(scope="module")
def draft_models(model, tmp_path_factory):
    """A draft model that is always right, and two that seldom are, one of them with windows."""
    small = {"seed": 1, "hidden_size": 16}
    return [
        model,
        tiny_model(tmp_path_factory.mktemp("draft"), num_hidden_layers=1, **small),
        tiny_model(tmp_path_factory.mktemp("draft"), "gemma2", sliding_window=9, **small),
    ]


@pytest.mark.parametrize("world", range(-(-WORLDS // 5)))
def test_nor_does_a_draft_model(world, model, oracle, draft_models, monkeypatch):
    """Drafts of random lengths by a model whose pool is often too small."""
    rng = random.Random(f"draft model-{SEED}-{world}")
    options, plans = draw_world(rng, oracle)
    path = draft_models[{0: 1, 3: 2}.get(world % 6, 0)]
    speculation = {"method": "draft_model", "model": str(path), "num_speculative_tokens": rng.choice([1, 3, 8])}
    options |= {"speculative_config": speculation, "enforce_eager": True}
    engine = build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", **options))
    drafter = engine.scheduler.drafts.drafter
    num_blocks = min(drafter.manager.num_blocks, rng.choice([4, 16, 1000]))
    manager = drafter.manager = BlockManager(num_blocks, options["block_size"], windows=drafter.manager.windows)
    drafter.free_rows = list(range(min(options["max_num_seqs"], rng.choice([1, 3, 100]))))
    num_rows = len(drafter.free_rows)
    if world % 2:
        run_as_on_a_gpu(engine)
    if world % 4 < 2:
        fail_at_times(engine, rng)
    launch = drafter.executor.worker.launch

    def failing_launch(batch):
        if rng.random() < 0.002:
            happened["failures of draft models"] += 1
            raise RuntimeError("a draft model fails")
        return launch(batch)

    def choose(rooms, most, schedule, seconds_to_make):
        assert seconds_to_make(1) >= 0
        return {seq: rng.randint(1, room) for seq, room in rooms.items() if rng.random() < 0.8}

    def counted_learn(seq, num_drafted, num_accepted):
        happened["tokens of draft models"] += num_drafted
        happened["tokens of draft models that were accepted"] += num_accepted
        check_blocks(manager)

    drafter.executor.worker.launch = failing_launch
    monkeypatch.setattr(drafter.gains, "choose", choose)
    monkeypatch.setattr(drafter.gains, "learn", counted_learn)
    monkeypatch.setattr(drafter.gains.costs, "of", lambda num_rows: StepTimes(1.0, 0, 0.0))
    run_world(engine, plans)
    happened["evictions of draft models"] += manager.prefixes.num_evictions
    assert not drafter.rows and manager.num_free_blocks == manager.num_blocks and len(drafter.free_rows) == num_rows
    for plan in plans:
        check = check_search if plan.searches else check_completions
        check(oracle, plan, options["max_model_len"])


@pytest.mark.parametrize("world", range(-(-WORLDS // 5)))
def test_nor_does_a_head(world, model, oracle, tmp_path, monkeypatch):
    """Drafts of a head that reads hidden states, and good ones in place of some of them."""
    rng = random.Random(f"head-{SEED}-{world}")
    options, plans = draw_world(rng, oracle)
    head = save_eagle(tmp_path, 32, **{TAPS: rng.choice([[0, 1, 2], [1], [0, 1]])})
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": rng.choice([1, 3, 8])}
    options |= {"speculative_config": speculation, "enforce_eager": True}
    engine = build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", **options))
    drafter, guesser = engine.scheduler.drafts.drafter, Guesser(oracle, plans, options["max_model_len"], rng)
    if world % 2:
        run_as_on_a_gpu(engine)
    if world % 4 < 2:
        fail_at_times(engine, rng)
    propose = drafter.propose

    def propose_better(decodes, most, schedule):
        drafts = propose(decodes, most, schedule)
        happened["drafts of heads"] += len(drafts)
        return {seq: guesser.guess(seq) if rng.random() < 0.5 else draft for seq, draft in drafts.items()}

    def choose(rooms, most, schedule, seconds_to_make):
        return {seq: rng.randint(1, room) for seq, room in rooms.items() if rng.random() < 0.8}

    drafter.propose = propose_better
    monkeypatch.setattr(drafter.gains, "choose", choose)
    monkeypatch.setattr(drafter.gains.costs, "of", lambda num_rows: StepTimes(1.0, 0, 0.0))
    run_world(engine, plans)
    assert drafter.heads.works and not drafter.heads.states
    for plan in plans:
        check = check_search if plan.searches else check_completions
        check(oracle, plan, options["max_model_len"])


@pytest.mark.parametrize("world", range(WORLDS))
def test_a_crowd_changes_no_answer(world, model, oracle, monkeypatch):
    monkeypatch.setattr("nanopage.sampling.truncation.CANDIDATES", 4)
    rng = random.Random(f"{SEED}-{world}")
    options, plans = draw_world(rng, oracle)
    if world % 5 == 0:
        press(rng, oracle, options, plans)
    ways = ((True, True), (False, False)), ((True, False), (False, True))  # overlapping steps, static buffers
    for overlap, static in (*ways[0], *ways[1]) if LONG else ways[world // 4 % 2]:
        plans = [plan.again() for plan in plans]
        options["async_scheduling"] = overlap
        engine = build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", **options))
        if world % 2:
            engine.executor = BytesExecutor(engine.executor)
        if static:
            run_as_on_a_gpu(engine)
        if overlap == static:
            fail_at_times(engine, rng)
        if not overlap and world % 4 != 1:
            engine.scheduler.drafts = Drafts(Guesser(oracle, plans, options["max_model_len"], rng))
        run_world(engine, plans)
        for plan in plans:
            check = check_search if plan.searches else check_completions
            check(oracle, plan, options["max_model_len"])

    manager = engine.scheduler.block_manager
    completions = [completion for plan in plans for completion in plan.output.outputs]
    happened["worlds"] += 1
    happened["worlds through bytes"] += world % 2
    happened["requests"] += len(plans)
    happened["requests with several completions"] += sum(not p.searches and p.params.num_sequences > 1 for p in plans)
    happened["beam searches"] += sum(plan.searches for plan in plans)
    happened["tokens"] += sum(len(completion.token_ids) for completion in completions)
    happened["worlds that preempted"] += engine.scheduler.queues.num_preemptions > 0
    happened["preemptions"] += engine.scheduler.queues.num_preemptions
    happened["worlds that swapped"] += engine.executor.worker.kv_cache.host is not None
    happened["worlds with prefix-cache hits"] += manager.num_hit_tokens > 0
    happened["tokens found in the prefix cache"] += manager.num_hit_tokens
    happened["worlds that evicted"] += manager.prefixes.num_evictions > 0
    happened["worlds with aborts"] += any(plan.aborted for plan in plans)
    happened["aborted completions"] += sum(completion.finish_reason == "abort" for completion in completions)
    happened["completions ended by a stop"] += sum(completion.finish_reason == "stop" for completion in completions)


def test_the_worlds_were_not_easy():
    """The suite must have met what it is for."""
    print("\n" + "\n".join(f"{count:8,} {what}" for what, count in happened.items()))
    worlds = happened["worlds"]
    if worlds < 50:
        pytest.skip("too few worlds were run to expect everything")
    assert worlds == WORLDS or "PYTEST_XDIST_WORKER" in os.environ  # other processes have run the others
    for what in ("worlds that preempted", "worlds with prefix-cache hits", "worlds that evicted", "worlds with aborts"):
        assert happened[what] > worlds * 0.1, what
    assert happened["tokens read before they were known"] > happened["tokens"] / 4
    assert happened["tokens dropped"] > worlds / 10
    assert happened["tokens of drafts that were accepted"] > happened["tokens of drafts"] / 4
    assert happened["drafts that were accepted whole"] > worlds
    assert happened["steps with drafts"] > worlds
    assert happened["steps with drafts and chunks of prompts"] > worlds / 10
    assert happened["steps on static buffers"] > happened["steps"] / 5
    assert happened["steps in pieces on static buffers"] > happened["steps"] / 20
    assert happened["steps that failed with copies or swaps"] > worlds / 20
    assert happened["constrained completions that were complete"] > worlds / 10
    assert happened["adapters loaded"] > worlds / 5
    assert happened["prompts with embeds"] > worlds
    assert happened["tokens of draft models that were accepted"] > happened["tokens of draft models"] / 4
    assert happened["tokens of draft models"] > worlds / 2
    assert happened["drafts of heads"] > worlds / 2
    assert happened["adapters found in their slots"] > worlds / 10
    assert happened["worlds with windows that preempted"] > worlds / 50
    assert happened["worlds to the bit that preempted"] > happened["worlds to the bit"] / 20
    assert happened["worlds with windows that swapped"] > worlds / 100
    assert happened["worlds with windows and prefix-cache hits"] > worlds / 10
    assert happened["worlds with states that preempted"] > worlds / 50
    assert happened["worlds with states that swapped"] > worlds / 100
    assert happened["worlds with states and prefix-cache hits"] > worlds / 20
    for what in ("worlds that swapped", "requests with several completions", "beam searches", "forks", "copies"):
        assert happened[what] > worlds * 0.01, what
