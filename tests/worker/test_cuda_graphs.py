"""Steps on static buffers, captured or not, against direct launches; and what is measured of the GPU's memory."""

import re
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from helpers import finish, tiny_model
from on_a_cpu import graphs_for, make_sample_all

from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.kernels import cache_write, paged_attention, rotate_and_write
from nanopage.params import MAX_LOGPROBS
from nanopage.state.layer_kinds import BlockNeeds
from nanopage.state.sampling_table import SamplingTable
from nanopage.step import Batch, BlockUpdate, Fork, NewSequence, SamplingSettings
from nanopage.worker import jit
from nanopage.worker.cuda_graphs import CUDAGraphs, batch_sizes, look_up
from nanopage.worker.eager import Eager
from nanopage.worker.memory import GIB, blocks_of_gpu, largest_batch, measure_step
from nanopage.worker.model_runner import ModelRunner
from nanopage.worker.piecewise_graphs import PiecewiseGraphs
from nanopage.worker.ways import Wings

MIXED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0, dry_multiplier=4, dry_allowed_length=1, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, logprobs=3, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, min_tokens=5, logit_bias={7: 3.0}, max_tokens=11),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("decode"))


def make_engine(model, **options):
    defaults = {"max_num_seqs": 7, "max_model_len": 64, "num_gpu_blocks_override": 40, "device": "cpu"}
    defaults |= {"dtype": "float64", "enforce_eager": True}
    return build_engine(EngineConfig(model=str(model), **defaults | options))


def make_graphs(worker, uses_triton=False):
    return graphs_for(worker.model, worker.kv_cache, worker.runner.table, uses_triton)


def static(engine, uses_triton=False):
    """Have an engine on a CPU run decodes as one on a GPU does. Returns the engine."""
    worker = engine.executor.worker
    made = worker.model, worker.kv_cache, worker.runner.table
    eager = Eager(*made, worker.setup.make_attention if uses_triton else None)
    graphs = make_graphs(worker, uses_triton)
    worker.runner.ways = [graphs, eager]
    worker.runner.sampler.sample_all = graphs.sample_all
    return engine


def graphs_of(engine):
    return engine.executor.worker.runner.ways[0]


def outputs_of(engine, requests=MIXED):
    for i, params in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": [1 + i, 9, 20 + 3 * i, 30]}, params)
    outputs = finish(engine)
    completions = [outputs[str(i)].outputs[0] for i in range(len(requests))]
    return [(each.token_ids, each.logprobs and len(each.logprobs)) for each in completions]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (40, [1, 2, 4, 8, 16, 32, 40]), (64, [1, 2, 4, 8, 16, 32, 48, 64])],
)
def test_batch_sizes_end_with_the_most(most, sizes):
    assert batch_sizes(most) == sizes


def test_sizes_are_never_far_apart():
    assert batch_sizes(10_000) == batch_sizes(1024)
    sizes = batch_sizes(1024)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 1024
    assert all(b <= 2 * a and b - a <= (64 if a >= 512 else 32) for a, b in pairwise(sizes))
    assert batch_sizes(600)[-3:] == [512, 576, 600]


@pytest.mark.parametrize("overlap", [False, True])
def test_static_buffers_change_no_token(model, overlap):
    engine = static(make_engine(model, async_scheduling=overlap))
    used = []
    graphs = graphs_of(engine)
    run = graphs.run
    graphs.run = lambda batch: used.append(len(batch.rows)) or run(batch)
    assert outputs_of(engine) == outputs_of(make_engine(model))
    assert {6, 5, 1} <= set(used)  # padded to 7, 7 and not at all
    assert outputs_of(engine) == outputs_of(make_engine(model)), "nothing of an earlier batch is left over"


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_nor_do_they_change_the_states_of_layers(tmp_path, family):
    """In blocks of their own size. Padding writes to a block that no sequence has."""
    model, options = tiny_model(tmp_path, family, torch.float64), {"block_size": 2, "max_model_len": 32}
    engine, used = static(make_engine(model, **options)), []
    graphs, cache = graphs_of(engine), engine.executor.worker.kv_cache
    run = graphs.run
    graphs.run = lambda batch: used.append(len(batch.rows)) or run(batch)
    for _ in range(2):
        assert outputs_of(engine) == outputs_of(make_engine(model, **options))
    assert {6, 5, 1} <= set(used) and cache.tensor.shape[2] == cache.num_blocks + 1


def test_truncated_rows_are_sampled_on_static_buffers_and_those_with_penalties_again(model):
    truncated = [{"top_p": 0.9}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"min_p": 0.1}, {"temperature": 0.0}]
    for more, calls in (({}, 1), ({"presence_penalty": 0.5}, 6)):  # the first step computes the prompts
        requests = [SamplingParams(seed=3, max_tokens=6, ignore_eos=True, **kind | more) for kind in truncated]
        engine = static(make_engine(model))
        sampler, seen = engine.executor.worker.runner.sampler, []
        sample = sampler.sample
        sampler.sample = lambda *arguments, sample=sample, seen=seen: seen.append(1) or sample(*arguments)
        assert outputs_of(engine, requests) == outputs_of(make_engine(model), requests)
        assert len(seen) == calls


def test_log_probabilities_are_float32_on_both_ways(model):
    engines = make_engine(model, dtype="bfloat16"), static(make_engine(model, dtype="bfloat16"))
    tables = []
    for engine in engines:
        engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2))
        output = finish(engine)["a"]
        tables.append([p.logprob for table in output.outputs[0].logprobs for p in table.values()])
    assert tables[0] == tables[1]
    assert tables[0] != torch.tensor(tables[0]).bfloat16().tolist()


def test_padding_writes_nothing(model):
    engine = static(make_engine(model, enable_prefix_caching=False))
    cache = engine.executor.worker.kv_cache.tensor.view(torch.uint8)  # unused blocks may hold NaN, unequal to itself
    for i in range(5):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    before = cache.clone()
    engine.step()
    used = {block for table in engine.scheduler.block_manager.block_tables.values() for block in table}
    changed = {block for block in range(cache.shape[2]) if not torch.equal(cache[:, :, block], before[:, :, block])}
    assert changed == used
    assert len(used) == 5


def test_what_does_not_fit_runs_directly(model):
    engine = static(make_engine(model, max_num_batched_tokens=3))
    graphs, launch = graphs_of(engine), engine.executor.worker.launch
    engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(n=3, seed=0, max_tokens=3, ignore_eos=True))
    seen = []

    def watched(batch):
        seen.append((batch.num_tokens, graphs.fits(batch)))
        return launch(batch)

    engine.executor.worker.launch = watched
    while engine.has_unfinished_requests():
        engine.step()
    # Three tokens of the prompt; the other two, from which three completions fork; then all of them together.
    assert seen == [(3, False), (2, False), (3, True), (3, True)]


def test_decodes_of_which_one_is_sampled_for_two_rows_do_not_fit(model):
    graphs = graphs_of(static(make_engine(model)))
    assert graphs.fits(Batch(rows=[2, 0], starts=[4, 4], counts=[1, 1], sampled_from=[0, 1], sampled_rows=[2, 0]))
    assert not graphs.fits(Batch(rows=[2], starts=[0], counts=[1], sampled_from=[0, 0], sampled_rows=[2, 0]))
    assert not graphs.fits(Batch(rows=[2], starts=[0], counts=[1])), "nothing is sampled"
    assert not graphs.fits(Batch(rows=[2], starts=[0], counts=[2], sampled_from=[0], sampled_rows=[2]))
    many = list(range(8))
    assert not graphs.fits(Batch(rows=many, starts=[1] * 8, counts=[1] * 8, sampled_from=many, sampled_rows=many))


def test_a_completion_that_was_forked_decodes_on_static_buffers(model):
    params = SamplingParams(n=3, seed=7, temperature=1.5, max_tokens=9, ignore_eos=True)

    def outputs(engine):
        engine.add_request("a", {"prompt_token_ids": list(range(3, 17))}, params)
        output = finish(engine)["a"]
        return [completion.token_ids for completion in output.outputs]

    engine = static(make_engine(model, block_size=4))
    expected = outputs(make_engine(model, block_size=4))
    assert outputs(engine) == expected and len({tuple(token_ids) for token_ids in expected}) == 3


def test_a_step_takes_its_inputs_from_the_table_and_puts_its_tokens_there(model):
    engine = static(make_engine(model, block_size=4))
    worker, graphs = engine.executor.worker, graphs_of(engine)
    table = worker.runner.table
    worker.kv_cache.tensor.zero_()
    table.update(
        Batch(
            new=[NewSequence(r, [5, 6, 7], 3, r, SamplingSettings(temperature=t)) for r, t in ((4, 0.0), (1, 2.0))],
            forks=[Fork(1, 2, 3, seed=9)],
            blocks=[BlockUpdate(4, 0, [8]), BlockUpdate(1, 0, [3]), BlockUpdate(2, 0, [6])],
        )
    )
    rows = [4, 2, 1]
    before = table.tokens.clone()
    output = graphs.run(Batch(rows=rows, starts=[2] * 3, counts=[1] * 3, sampled_from=[0, 1, 2], sampled_rows=rows))
    assert output.logits.shape == (3, 300) and output.hidden is None
    assert output.tokens[0] == output.logits[0].argmax()
    assert torch.equal(table.tokens[rows, 3], output.tokens)
    table.tokens[rows, 3] = before[rows, 3]
    before[-1, 1] = table.tokens[-1, 1]  # of the row for padding
    assert torch.equal(table.tokens, before)


def test_splits_reach_from_one_to_what_the_longest_context_can_use(model, monkeypatch):
    monkeypatch.setattr("nanopage.kernels.paged_attention.num_processors", lambda device: 132)
    engine = static(make_engine(model, max_num_seqs=256), uses_triton=True)
    assert graphs_of(engine).splits == [1]
    graphs = make_graphs(engine.executor.worker, uses_triton=True)
    graphs.max_model_len = 40_960  # 2 KV heads
    assert graphs.splits == [1, 4, 16, 64, 132]
    assert graphs._choose_splits([200]) == graphs._choose_splits([250]) == 1
    assert graphs._choose_splits([300]) == graphs._choose_splits([1500]) == 4
    assert graphs._choose_splits([1000] * 256) == graphs._choose_splits([1000] * 200) == 1
    assert graphs._choose_splits([40_000] + [10] * 255) == 64
    assert graphs._choose_splits([5_000] * 16) == 16


def test_hundreds_of_sequences_decode_on_static_buffers(model):
    requests = [SamplingParams(temperature=0, max_tokens=2 + i % 2, ignore_eos=True) for i in range(590)]

    def tokens(engine):
        for i, params in enumerate(requests):
            engine.add_request(str(i), [1 + i % 290, 1 + i // 290], params)
        return {name: output.outputs[0].token_ids for name, output in finish(engine).items()}

    options = {"max_num_seqs": 600, "max_model_len": 16, "num_gpu_blocks_override": 600}
    engine, sizes = static(make_engine(model, **options)), []
    graphs = graphs_of(engine)
    step = graphs._step
    graphs._step = lambda size, splits: sizes.append((size, graphs.num_rows)) or step(size, splits)
    assert tokens(engine) == tokens(make_engine(model, **options))
    assert sizes == [(600, 590), (320, 295)]


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph: what it captures is the arguments of a step, which a replay runs again."""

    def replay(self):
        self.step(*self.arguments)
        self.replays += 1


@pytest.fixture
def fake_cuda(monkeypatch):
    """What capturing asks of torch.cuda, on a CPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 8 * GIB))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    steps, step = [], CUDAGraphs._step

    def recorded(self, *arguments):
        steps.append(arguments)
        step(self, *arguments)

    @contextmanager
    def capture(graph, pool, capture_error_mode="global"):
        assert pool == "pool"
        before = len(steps)
        yield
        assert len(steps) == before + 1
        assert steps[-1] == steps[-2], "a step is warmed up before it is captured"
        graph.step, graph.arguments, graph.replays = step, steps[-1], 0

    monkeypatch.setattr(CUDAGraphs, "_step", recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return steps


def record_launches(monkeypatch, variants):
    """Add the name and the constants of each Triton kernel that is launched to a set."""

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                variants.add((self.kernel.fn.__name__, *sorted(options.items())))
                self.kernel[grid](*arguments, **options)

            return launch

    for module in (cache_write, paged_attention, rotate_and_write):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorded(getattr(module, name)))


@pytest.mark.interpreter
def test_every_size_is_captured_the_largest_first_and_replays_give_the_same_tokens(model, fake_cuda):
    expected = outputs_of(make_engine(model, max_num_seqs=6))
    engine = static(make_engine(model, max_num_seqs=6), uses_triton=True)
    graphs = graphs_of(engine)
    graphs.capture(graphs.sizes)
    captured = [(size, splits) for size in (6, 4, 2, 1) for splits in graphs.splits]
    assert list(graphs.graphs) == captured
    for graph in graphs.graphs.values():
        graph.step = partial(graph.step, graphs)
    del fake_cuda[:]
    assert outputs_of(engine) == expected
    assert fake_cuda == [], "nothing is launched but replays"
    assert {size for (size, _), graph in graphs.graphs.items() if graph.replays} == {6, 4, 2, 1}


def test_up_to_1024_sequences_replay_graphs(model, fake_cuda, monkeypatch):
    monkeypatch.setattr(CUDAGraphs, "_step", lambda self, *arguments: fake_cuda.append(arguments))
    graphs = graphs_of(static(make_engine(model, max_num_seqs=1100)))
    graphs.capture(graphs.sizes)
    assert list(graphs.graphs) == [(size, 1) for size in reversed(batch_sizes(1024))]
    for graph in graphs.graphs.values():
        graph.step = lambda *arguments: None

    def batch(size):
        rows = list(range(size))
        return Batch(rows=rows, starts=[1] * size, counts=[1] * size, sampled_from=rows, sampled_rows=rows)

    assert not graphs.fits(batch(1025))
    for size, captured in ((1024, 1024), (961, 1024), (513, 576), (512, 512)):
        assert graphs.fits(batch(size))
        replays = graphs.graphs[captured, 1].replays
        graphs.run(batch(size))
        assert graphs.graphs[captured, 1].replays == replays + 1


@pytest.mark.interpreter
def test_capturing_writes_to_no_sequence(model, fake_cuda):
    engine = static(make_engine(model, max_num_seqs=6), uses_triton=True)
    table = engine.executor.worker.runner.table
    table.tokens.random_(300)
    tokens, cache = table.tokens.clone(), engine.executor.worker.kv_cache.tensor.zero_()
    graphs_of(engine).capture([1, 2, 4, 6])
    changed = (table.tokens != tokens).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) <= {0}, "the row that unwritten buffers name, which no sequence has yet"
    assert not cache.any()


@pytest.mark.interpreter
def test_nothing_is_compiled_while_serving(model, fake_cuda, monkeypatch, compiled_graphs):
    """By Dynamo, of which a backend counts the graphs, or by Triton, for constants that a kernel has not had before.

    Decodes as graphs, others by the compiled model; test_piecewise_graphs.py has the same with pieces as graphs.
    """
    variants = set()
    record_launches(monkeypatch, variants)
    monkeypatch.setattr(paged_attention, "num_processors", lambda device: 132)
    monkeypatch.setattr(paged_attention, "SPLIT_TOKENS", 32)  # a short context is split, too
    engine = make_engine(model, max_num_seqs=2, max_model_len=64)
    worker = engine.executor.worker
    setup = worker.setup
    compiled = jit.compile_model(worker.model, setup.model_config, setup.dtype, setup.device)
    made, table = (compiled, worker.kv_cache, worker.runner.table), worker.runner.table
    # A kernel in Triton's interpreter cannot be compiled into the sampler, so truncation sorts here.
    sample_all = make_sample_all(wrap=jit.compile_afresh)
    sampling = SamplingTable(len(table.tokens), setup.model_config.vocab_size, setup.device)
    jit.warm_up_sampling(sample_all, sampling, setup.dtype, setup.device)
    with torch.compiler.set_stance("fail_on_recompile"):
        measure_step(setup, Wings(), worker.model, sample_all)
    variants.clear()
    ways = [CUDAGraphs(*made, sample_all, jit.compile_afresh), Eager(*made, worker.setup.make_attention)]
    worker.runner.ways, worker.runner.sampler.sample_all = ways, sample_all
    ways[0].capture(ways[0].sizes)
    for graph in ways[0].graphs.values():
        graph.step = partial(graph.step, ways[0])
    kernels = {name for name, *_ in variants}
    assert kernels == {"rotate_kernel", "decode_kernel", "merge_kernel"}, "there is no prompt"
    assert len(variants) == 4, "contexts are split, or not"
    worker._warm_up()
    assert len(variants) == 5
    before = len(compiled_graphs), set(variants)
    with torch.compiler.set_stance("fail_on_recompile"):
        for name, prompt, params in (
            ("beside", [3, 4], {"max_tokens": 3}),
            ("long", [1] * 50, {"max_tokens": 3}),
            ("twice", [5], {"n": 2, "temperature": 1.0, "max_tokens": 2}),
            ("truncated", [6, 7], {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "max_tokens": 3}),
            ("penalized", [6, 7], {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5, "max_tokens": 3}),
        ):
            engine.add_request(name, prompt, SamplingParams(**{"temperature": 0, "ignore_eos": True} | params))
        while engine.has_unfinished_requests():
            assert not any(output.error for output in engine.step())
    assert (len(compiled_graphs), variants) == before


@pytest.mark.interpreter
def test_memory_that_runs_out_while_capturing_is_an_error_that_says_what_helps(model, fake_cuda, monkeypatch):
    @contextmanager
    def full(graph, pool, capture_error_mode):
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(torch.cuda, "graph", full)
    graphs = make_graphs(make_engine(model, max_num_seqs=6).executor.worker, uses_triton=True)
    with pytest.raises(MemoryError, match=r"batch size 6 .*max_num_seqs or gpu_memory_utilization.*enforce_eager"):
        graphs.capture([6])


@pytest.mark.interpreter
def test_another_error_while_capturing_comes_out_as_it_is(model, fake_cuda, monkeypatch):
    @contextmanager
    def broken(graph, pool, capture_error_mode):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "graph", broken)
    graphs = make_graphs(make_engine(model, max_num_seqs=6).executor.worker, uses_triton=True)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture([6])


@pytest.mark.interpreter
def test_the_largest_step_there_can_be_is_measured(model, fake_cuda, monkeypatch):
    worker = make_engine(model, max_num_seqs=6, num_gpu_blocks_override=4, max_num_batched_tokens=100).executor.worker
    setup, sample_all = worker.setup, make_sample_all(True)
    launch, batches = ModelRunner.launch, []
    monkeypatch.setattr(ModelRunner, "launch", lambda self, batch: batches.append(batch) or launch(self, batch))
    table_bytes = worker.runner.table.num_bytes + paged_attention.PROMPT_SPLIT_BYTES
    assert measure_step(setup, Wings(), worker.model, sample_all) == 250 + table_bytes
    (batch,) = batches
    assert batch.num_tokens == 100
    assert batch.counts == [1, 1, 1, 1, 32, 64]
    assert batch.sampled_rows == batch.rows
    assert all(new.sampling.prompt_logprobs == new.sampling.logprobs == MAX_LOGPROBS for new in batch.new)
    # Before; with the graph of size 6; with that of size 1, too. The others are 1, 2 and 4.
    # Then with the pieces of 100 tokens; with those of 8, too. The others are 8, 16, 32, 64 and 96.
    free = iter([9000, 7000, 6900, 6500, 6480])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 10_000))
    monkeypatch.setattr("nanopage.worker.memory.captures", lambda setup: True)
    monkeypatch.setattr(jit, "compile_afresh", lambda function: function)
    monkeypatch.setattr(PiecewiseGraphs, "_capture", lambda self, size, pool: captured.append((size, pool)))
    model, captured = jit.CompiledDecoder(worker.model), []
    expected = 250 + table_bytes + 2000 + 3 * 100 + 400 + 5 * 20
    assert measure_step(setup, Wings(), model, sample_all) == expected
    assert captured == [(100, "pool"), (8, "pool")], "in the memory of the decode steps"
    assert len(batches) == 2


def test_the_kv_cache_gets_what_weights_and_the_largest_step_leave(caplog):
    config = EngineConfig(block_size=16)
    size, needs = 2**20, BlockNeeds((None,), 16, 8192)
    with caplog.at_level("INFO", logger="nanopage"):
        assert blocks_of_gpu(config, size, needs, 80 * GIB, 20 * GIB, 4 * GIB) == 48 * 1024
    assert "80.00 GiB, gpu_memory_utilization=0.9 gives 72.00; weights and what else is there take 20.00" in caplog.text
    assert "the largest step takes 4.00; the 48.00 GiB left for the KV cache hold 786,432 tokens" in caplog.text
    half = EngineConfig(gpu_memory_utilization=0.5, max_model_len=4096)
    assert blocks_of_gpu(half, size, needs, 80 * GIB, 20 * GIB, 4 * GIB) == 16 * 1024
    message = (
        "8.00 GiB, gpu_memory_utilization=0.5 gives 4.00; weights and what else is there take 3.00, the largest step "
        "takes 0.90; the 0.10 GiB left for the KV cache hold 1,632 tokens, not 4,096: raise gpu_memory_utilization, or "
        "lower max_num_batched_tokens"
    )
    with pytest.raises(MemoryError, match=re.escape(message)):
        blocks_of_gpu(half, size, needs, 8 * GIB, 3 * GIB, int(0.9 * GIB))
    with pytest.raises(MemoryError, match="hold 0 tokens, not 16: raise"):
        blocks_of_gpu(config, size, needs, 8 * GIB, 9 * GIB, GIB)


@pytest.mark.parametrize("case", [(100, 6, 64), (3, 6, 64), (6, 6, 64), (100, 2, 8), (2048, 256, 40_000)])
def test_the_largest_batch_has_no_more_than_it_may(case):
    num_tokens, num_seqs, max_model_len = case
    batch = largest_batch(num_tokens, num_seqs, max_model_len, 16, 333)
    lengths = batch.counts
    assert [*batch.masks] == [*range(1, len(lengths))] and {len(mask) for mask in batch.masks.values()} == {42}
    assert sum(lengths) == min(num_tokens, num_seqs * max_model_len)
    assert len(lengths) == min(num_seqs, num_tokens)
    assert 1 <= min(lengths) <= max(lengths) <= max_model_len
    assert lengths == sorted(lengths)
    assert [len(new.token_ids) for new in batch.new] == lengths
    assert [len(update.blocks) for update in batch.blocks] == [-(-length // 16) for length in lengths]


def test_what_is_around_the_model_is_compiled_for_any_size_and_once_more_for_one(compiled_graphs):
    before = torch.compile(look_up, fullgraph=True)
    plain = make_sample_all()
    after = make_sample_all(wrap=partial(torch.compile, fullgraph=True))
    tokens = torch.randint(0, 300, (49, 33))
    blocks = torch.randint(0, 9, (49, 5, 2)).int()
    temperatures, seeds = torch.rand(49, dtype=torch.float64).round(decimals=1), torch.randint(-9, 9, (49,))
    limits = [torch.randint(1, 301, (49,)), torch.rand(49, dtype=torch.float64), torch.zeros(49, dtype=torch.float64)]
    for size in (48, 32, 16, 8, 4, 2, 1):  # as capturing goes
        generator = torch.Generator().manual_seed(size)
        rows = torch.randperm(49, generator=generator)[:size]
        seq_lens = torch.randint(0, 33, (size,), generator=generator)
        arguments = rows, seq_lens, tokens, blocks, 8, (None, 5)
        *ours, our_pages = before(*arguments)
        *theirs, their_pages = look_up(*arguments)
        ours, theirs = [*ours, *chain(*our_pages)], [*theirs, *chain(*their_pages)]
        assert len(ours) == 8 and all(map(torch.equal, ours, theirs))
        logits = torch.randn(size, 300, generator=generator)
        arguments = logits, rows, seq_lens, temperatures, seeds, limits
        assert torch.equal(after(*arguments), plain(*arguments))
    assert len(compiled_graphs) == 6  # one size, any size, size 1


def test_what_is_looked_up_is_the_last_token_of_each_row_and_its_slot():
    tokens = torch.arange(100, 130).view(3, 10)
    block_tables = torch.tensor([[4, 7, 1], [3, 0, 2], [9, 9, 9]])
    rows, seq_lens = torch.tensor([1, 0, 1, 2]), torch.tensor([1, 8, 9, 0])
    input_ids, positions, [(slots, tables, lens)] = look_up(rows, seq_lens, tokens, block_tables[:, :, None], 4)
    assert input_ids.tolist() == [110, 107, 118, 120]
    assert positions.tolist() == [0, 7, 8, 0]
    assert slots.tolist() == [12, 31, 8, -1], "padding is not written"
    assert torch.equal(tables, block_tables[rows]) and torch.equal(lens, seq_lens)


def test_what_is_looked_up_for_a_window_begins_where_the_window_does():
    tokens, gone = torch.arange(100, 148).view(3, 16), -1
    blocks = torch.tensor([[4, 7, 1, 0], [gone, gone, 2, 5], [9, 9, 9, 9]])
    rows, seq_lens = torch.tensor([1, 0, 1, 2]), torch.tensor([14, 3, 12, 0])
    _, _, [whole, (slots, tables, lens)] = look_up(
        rows, seq_lens, tokens, blocks[:, :, None].repeat(1, 1, 2), 4, (None, 5)
    )
    assert slots.tolist() == whole[0].tolist() == [21, 18, 11, -1]
    assert tables.tolist() == [[2, 5], [4, 7], [gone, 2], [9, 9]]
    assert lens.tolist() == [6, 3, 8, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_replayed_graphs_give_the_tokens_of_direct_launches(model, overlap):
    requests = [params for params in MIXED for _ in range(2)]

    def engine(**options):
        config = {"device": "cuda", "dtype": "float32", "max_num_seqs": 12, "max_model_len": 64, "kv_cache_gib": 0.1}
        return build_engine(EngineConfig(model=str(model), async_scheduling=overlap, **config | options))

    eager, graphs = engine(enforce_eager=True), engine()
    assert {size for size, _ in graphs_of(graphs).graphs} == set(batch_sizes(12))
    kernels = (
        cache_write.write_kernel, rotate_and_write.rotate_kernel, paged_attention.decode_kernel,
        paged_attention.merge_kernel, paged_attention.prefill_kernel,
    )  # fmt: skip
    variants = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            assert outputs_of(graphs, requests) == outputs_of(eager, requests)
    assert [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels] == variants


@pytest.mark.gpu
def test_the_kv_cache_and_the_graphs_stay_within_their_share_of_the_gpu(tmp_path):
    # 16 KiB a token: 1,024 sequences of 1,024 tokens could use 16 GiB, four times what the share leaves on any GPU.
    model = tiny_model(tmp_path, head_dim=128, num_attention_heads=8, num_key_value_heads=8)
    free, total = torch.cuda.mem_get_info()
    left = 4 * GIB
    share = 1 - (free - left) / total
    engine = build_engine(
        EngineConfig(model=str(model), device="cuda", gpu_memory_utilization=share, max_num_seqs=1024)
    )
    assert left / 2 < engine.executor.worker.kv_cache.tensor.nbytes < left
    outputs_of(engine)
    assert total - torch.cuda.mem_get_info()[0] <= share * total + 2**28
