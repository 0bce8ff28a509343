import re
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers import tiny_model

from nanopage import EngineConfig, LLMEngine, SamplingParams
from nanopage.worker.cuda_graphs import DecodeGraphs, batch_sizes, inputs_of, sample
from nanopage.worker.kv_cache import GIB, blocks_of_gpu
from nanopage.worker.model_runner import largest_batch

MIXED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, logprobs=3, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, min_tokens=5, logit_bias={7: 3.0}, max_tokens=11),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("decode"))


def make_engine(model, **options):
    defaults = {"max_num_seqs": 7, "max_model_len": 64, "num_gpu_blocks_override": 40, "device": "cpu"}
    defaults |= {"dtype": "float64", "enforce_eager": True}
    return LLMEngine(EngineConfig(model=str(model), **defaults | options))


def static(engine):
    runner = engine.runner
    runner.decode_graphs = DecodeGraphs(runner.model, engine.kv_cache, runner.sampled, engine.max_model_len)
    return engine


def outputs_of(engine, requests=MIXED):
    for i, params in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": [1 + i, 9, 20 + 3 * i, 30]}, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    return [
        (done[str(i)].token_ids, done[str(i)].logprobs and len(done[str(i)].logprobs)) for i in range(len(requests))
    ]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (40, [1, 2, 4, 8, 16, 32, 40]), (64, [1, 2, 4, 8, 16, 32, 48, 64])],
)
def test_batch_sizes_end_with_the_most(most, sizes):
    assert batch_sizes(most) == sizes


def test_sizes_are_never_far_apart():
    assert batch_sizes(10_000) == batch_sizes(512)
    sizes = batch_sizes(512)
    assert sizes == sorted(set(sizes))
    assert all(b <= 2 * a and b - a <= 32 for a, b in pairwise(sizes))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_static_buffers_change_no_token(model, async_scheduling):
    engine = static(make_engine(model, async_scheduling=async_scheduling))
    used = []
    load = engine.runner.decode_graphs.load
    engine.runner.decode_graphs.load = lambda sequences: used.append(len(sequences)) or load(sequences)
    assert outputs_of(engine) == outputs_of(make_engine(model))
    assert {6, 5, 1} <= set(used)  # padded to 7, 7 and not at all
    assert outputs_of(engine) == outputs_of(make_engine(model)), "nothing of an earlier batch is left over"


def test_log_probabilities_are_float32_on_both_ways(model):
    engines = make_engine(model, dtype="bfloat16"), static(make_engine(model, dtype="bfloat16"))
    tables = []
    for engine in engines:
        engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2))
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        tables.append([p.logprob for table in output.outputs[0].logprobs for p in table.values()])
    assert tables[0] == tables[1]
    assert tables[0] != torch.tensor(tables[0]).bfloat16().tolist()


def test_padding_writes_nothing(model):
    engine = static(make_engine(model, enable_prefix_caching=False))
    cache = engine.kv_cache.tensor.view(torch.uint8)  # unused blocks may hold NaN, unequal to itself
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
    graphs = engine.runner.decode_graphs
    engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(n=3, seed=0, max_tokens=3, ignore_eos=True))
    schedule, seen = engine.scheduler.schedule, []

    def watched():
        batch = schedule()
        seen.append((batch.num_tokens, graphs.fit(batch)))
        return batch

    engine.scheduler.schedule = watched
    while engine.has_unfinished_requests():
        engine.step()
    # Three tokens of the prompt; the other two, from which three completions fork; then all of them together.
    assert seen == [(3, False), (2, False), (3, True), (3, True)]


def test_the_splits_of_a_size_reach_from_equal_lengths_to_one_that_has_all_the_tokens(model, monkeypatch):
    monkeypatch.setattr("nanopage.worker.cuda_graphs.uses_triton", lambda device: True)
    monkeypatch.setattr("nanopage.kernels.paged_attention.num_processors", lambda device: 132)
    graphs = static(make_engine(model, max_num_seqs=256)).runner.decode_graphs
    graphs.max_model_len = 40_960  # 2 KV heads
    assert graphs.splits_of(1) == [132]
    assert graphs.splits_of(16) == [9, 36, 132]
    assert graphs.splits_of(256) == [1, 4, 16, 64, 132]
    assert graphs._choose_splits(256, [1000] * 256) == 1
    assert graphs._choose_splits(256, [1000] * 200) == 1
    assert graphs._choose_splits(256, [40_000] + [10] * 255) == 64
    assert graphs._choose_splits(16, [5_000] * 16) == 9
    graphs.max_model_len = 250
    assert graphs.splits_of(256) == [1]


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph: what it captures is the arguments of a step, which a replay runs again."""

    def replay(self):
        self.step(*self.arguments)
        self.replays += 1


@pytest.fixture
def fake_cuda(monkeypatch):
    """What capturing asks of torch.cuda, and how the model's attention is computed there, on a CPU."""
    monkeypatch.setattr("nanopage.worker.cuda_graphs.uses_triton", lambda device: True)
    monkeypatch.setattr("nanopage.worker.model_runner.uses_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 8 * GIB))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    steps, step = [], DecodeGraphs._step

    def recorded(self, *arguments):
        steps.append(arguments)
        step(self, *arguments)

    @contextmanager
    def capture(graph, pool):
        assert pool == "pool"
        before = len(steps)
        yield
        assert len(steps) == before + 1
        assert steps[-1] == steps[-2], "a step is warmed up before it is captured"
        graph.step, graph.arguments, graph.replays = step, steps[-1], 0

    monkeypatch.setattr(DecodeGraphs, "_step", recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return steps


def test_every_size_is_captured_the_largest_first_and_replays_give_the_same_tokens(model, fake_cuda):
    engine = make_engine(model, max_num_seqs=6)
    expected = outputs_of(make_engine(model, max_num_seqs=6))
    runner = engine.runner
    graphs = DecodeGraphs(runner.model, engine.kv_cache, runner.sampled, engine.max_model_len)
    graphs.capture(graphs.sizes)
    captured = [(size, splits) for size in (6, 4, 2, 1) for splits in graphs.splits_of(size)]
    assert list(graphs.graphs) == captured
    for graph in graphs.graphs.values():
        graph.step = partial(graph.step, graphs)
    runner.decode_graphs = graphs
    del fake_cuda[:]
    assert outputs_of(engine) == expected
    assert fake_cuda == [], "nothing is launched but replays"
    assert {size for (size, _), graph in graphs.graphs.items() if graph.replays} == {6, 4, 2, 1}


def test_memory_that_runs_out_while_capturing_is_an_error_that_says_what_helps(model, fake_cuda, monkeypatch):
    @contextmanager
    def full(graph, pool):
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(torch.cuda, "graph", full)
    runner = make_engine(model, max_num_seqs=6).runner
    with pytest.raises(MemoryError, match=r"batch size 6 .*max_num_seqs or gpu_memory_utilization.*enforce_eager"):
        DecodeGraphs(runner.model, runner.kv_cache, runner.sampled, 64).capture([6])


def test_the_profile_is_of_the_largest_step_there_can_be(model, fake_cuda, monkeypatch):
    runner = make_engine(model, max_num_seqs=6, num_gpu_blocks_override=4).runner
    launch, batches = runner.launch, []
    monkeypatch.setattr(runner, "launch", lambda batch: batches.append(batch) or launch(batch))
    assert runner.profile(100, 64, capture=False) == 250
    # Before; with the graph of size 6; with that of size 1, too. The others are 1, 2 and 4, with their splits.
    free = iter([9000, 7000, 6900])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 10_000))
    monkeypatch.setattr("nanopage.worker.model_runner.compile_afresh", lambda function: function)
    monkeypatch.setattr(DecodeGraphs, "splits_of", lambda self, size: [1] if size == 1 else [1, 2])
    assert runner.profile(100, 64, capture=True) == 250 + 2000 + 5 * 100
    del batches[1:]
    (batch,) = batches
    assert batch.num_tokens == 100
    assert [s.num_tokens for s in batch.sequences] == [16, 16, 17, 17, 17, 17]
    assert all(s.samplers == [s.seq] for s in batch.sequences)
    assert runner.decode_graphs is None


def test_the_kv_cache_gets_what_weights_and_the_largest_step_leave(caplog):
    config = EngineConfig(block_size=16)
    size = 2**20
    with caplog.at_level("INFO", logger="nanopage"):
        assert blocks_of_gpu(config, size, 80 * GIB, 20 * GIB, 4 * GIB) == 48 * 1024
    assert "80.00 GiB, gpu_memory_utilization=0.9 gives 72.00; weights and what else is there take 20.00" in caplog.text
    assert "the largest step takes 4.00; the 48.00 GiB left for the KV cache hold 786,432 tokens" in caplog.text
    half = EngineConfig(gpu_memory_utilization=0.5, max_model_len=4096)
    assert blocks_of_gpu(half, size, 80 * GIB, 20 * GIB, 4 * GIB) == 16 * 1024
    message = (
        "8.00 GiB, gpu_memory_utilization=0.5 gives 4.00; weights and what else is there take 3.00, the largest step "
        "takes 0.90; the 0.10 GiB left for the KV cache hold 1,632 tokens, not 4,096: raise gpu_memory_utilization, or "
        "lower max_num_batched_tokens"
    )
    with pytest.raises(MemoryError, match=re.escape(message)):
        blocks_of_gpu(half, size, 8 * GIB, 3 * GIB, int(0.9 * GIB))
    with pytest.raises(MemoryError, match="hold 0 tokens, not 16: raise"):
        blocks_of_gpu(config, size, 8 * GIB, 9 * GIB, GIB)


@pytest.mark.parametrize("case", [(100, 6, 64), (3, 6, 64), (6, 6, 64), (100, 2, 8), (2048, 256, 40_000)])
def test_the_largest_batch_has_no_more_than_it_may(case):
    num_tokens, num_seqs, max_model_len = case
    lengths = [s.num_tokens for s in largest_batch(num_tokens, num_seqs, max_model_len, 16).sequences]
    assert sum(lengths) == min(num_tokens, num_seqs * max_model_len)
    assert len(lengths) == min(num_seqs, num_tokens)
    assert 1 <= min(lengths) <= max(lengths) <= max_model_len
    assert lengths == sorted(lengths)


def test_what_is_around_the_model_is_compiled_for_any_size_and_once_more_for_one():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    before, after = (torch.compile(function, fullgraph=True, backend=counting) for function in (inputs_of, sample))
    for size in (48, 32, 16, 8, 4, 2, 1):  # as capturing goes
        generator = torch.Generator().manual_seed(size)
        ints = torch.randint(-size, 30, (3, size), generator=generator)
        ints[1] = torch.randint(0, 33, (size,), generator=generator)
        tables = torch.randint(0, 9, (48, 4), generator=generator).int()[:size]
        sampled = torch.randint(0, 300, (48,), generator=generator)
        for ours, plain in zip(before(ints, tables, sampled, 8), inputs_of(ints, tables, sampled, 8), strict=True):
            assert torch.equal(ours, plain)
        logits = torch.randn(size, 300, generator=generator)
        temperatures = torch.rand(size, generator=generator).round(decimals=1)
        assert torch.equal(after(logits, temperatures, ints), sample(logits, temperatures, ints))
    assert len(graphs) == 6  # one size, any size, size 1


@pytest.mark.gpu
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_replayed_graphs_give_the_tokens_of_direct_launches(model, async_scheduling):
    requests = [params for params in MIXED for _ in range(2)]

    def engine(**options):
        config = {"device": "cuda", "dtype": "float32", "max_num_seqs": 12, "max_model_len": 64, "kv_cache_gib": 0.1}
        return LLMEngine(EngineConfig(model=str(model), async_scheduling=async_scheduling, **config | options))

    eager, graphs = engine(enforce_eager=True), engine()
    assert {size for size, _ in graphs.runner.decode_graphs.graphs} == set(batch_sizes(12))
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            assert outputs_of(graphs, requests) == outputs_of(eager, requests)


@pytest.mark.gpu
def test_the_kv_cache_and_the_graphs_stay_within_their_share_of_the_gpu(model):
    free, total = torch.cuda.mem_get_info()
    share = 1 - free / total + 0.2
    engine = LLMEngine(EngineConfig(model=str(model), device="cuda", gpu_memory_utilization=share, max_num_seqs=10_000))
    assert engine.kv_cache.tensor.nbytes > 0.1 * total
    outputs_of(engine)
    assert total - torch.cuda.mem_get_info()[0] <= share * total + 2**28
