"""Mixed and prompt steps on static buffers, captured in pieces or not, against direct launches."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from helpers import (
    LONG,
    TEMPERATURE,
    Paged,
    assert_all_close,
    finish,
    random_tokens,
    reference_logits,
    tiny_hf_model,
    tiny_model,
)
from on_a_cpu import graphs_for, make_sample_all, pieces_for
from seeing import QWEN_PLACE, picture, qwen_model
from test_cuda_graphs import MIXED, make_engine, outputs_of, record_launches

from nanopage import SamplingParams
from nanopage.kernels import paged_attention
from nanopage.step import Batch
from nanopage.weights import loader
from nanopage.worker import jit
from nanopage.worker.eager import Eager, prepare
from nanopage.worker.jit import CompiledDecoder, compile_model
from nanopage.worker.piecewise_graphs import PiecewiseGraphs, token_counts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("pieces"), num_hidden_layers=3)


@pytest.fixture
def uncompiled(monkeypatch):
    """Pieces run as they are written."""
    monkeypatch.setattr(jit, "compile_afresh", lambda function: function)


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph. A replay computes the piece again from the tensors that were its inputs, and
    puts the results where they were while it was captured."""

    def replay(self):
        self.outputs.x.copy_(self.piece().x)
        self.replays += 1


@pytest.fixture
def fake_cuda(monkeypatch):
    """What capturing pieces asks of torch.cuda, on a CPU. Returns (size, index of the
    layer, piece, outputs) of each piece that has been computed."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    calls, run = [], PiecewiseGraphs._run

    def recorded(self, size, index, piece):
        def kept():
            calls.append((size, index, piece, piece()))
            return calls[-1][-1]

        return run(self, size, index, kept)

    @contextmanager
    def capture(graph, pool):
        assert pool == "pool"
        before = len(calls)
        yield
        ((*which, graph.piece, graph.outputs),) = calls[before:]
        assert which in [[*warm[:2]] for warm in calls[:before]], "a piece is warmed up before it is captured"
        graph.replays = 0

    monkeypatch.setattr(PiecewiseGraphs, "_run", recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return calls


def pieces_of(engine):
    return next(way for way in engine.executor.worker.runner.ways if isinstance(way, PiecewiseGraphs))


def in_pieces(engine, most=512, uses_triton=False):
    """Have an engine on a CPU run steps as one on a GPU does. Returns the engine."""
    worker = engine.executor.worker
    model, made = pieces_for(worker.model, uses_triton), (worker.kv_cache, worker.runner.table)
    make_attention = worker.setup.make_attention if uses_triton else None
    worker.runner.sampler.sample_all = sample_all = make_sample_all(uses_triton)
    worker.runner.ways = [
        graphs_for(model, *made, uses_triton, sample_all),
        PiecewiseGraphs(model, *made, make_attention, most),
        Eager(model, *made, make_attention),
    ]
    return engine


def capture(engine):
    """Capture all pieces with stand-ins. Returns them."""
    pieces = pieces_of(engine)
    pieces.capture(pieces.sizes, "pool")
    return pieces


def test_sizes_are_never_far_apart():
    assert token_counts(1) == [1]
    assert token_counts(8) == [8]
    assert token_counts(40) == [8, 16, 32, 40]
    assert token_counts(8192) == token_counts(512)
    sizes = token_counts(512)
    assert len(sizes) == 14 and sizes[-1] == 512
    assert all(b <= 2 * a and b - a <= (64 if a >= 256 else 32) for a, b in pairwise(sizes))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("overlap", [False, True])
def test_static_buffers_change_no_token(model, overlap):
    options = {"max_num_batched_tokens": 20, "async_scheduling": overlap}
    engine = in_pieces(make_engine(model, **options), most=16)
    ways, used = engine.executor.worker.runner.ways, []
    for way in ways:
        way.run = lambda batch, way=way, run=way.run: used.append((type(way).__name__, batch.num_tokens)) or run(batch)
    expected = outputs_of(make_engine(model, **options))
    assert outputs_of(engine) == expected
    assert {name for name, _ in used} == {"PlainGraphs", "PiecewiseGraphs", "Eager"}
    assert all((tokens <= 16) == (name != "Eager") for name, tokens in used)
    assert outputs_of(engine) == expected, "nothing of an earlier batch is left over"


@pytest.mark.usefixtures("uncompiled")
def test_tokens_after_images_have_other_positions(tmp_path):
    """Decodes, and chunks of prompts in which no token is of an image."""
    qwen_model(tmp_path)
    options = {"max_num_batched_tokens": 9, "max_model_len": 300, "enable_prefix_caching": False}
    data = [{"image": [picture(60, 40)] * count} for count in (2, 1, 0)]
    prompts = [{"prompt": f" the cat {QWEN_PLACE}" * len(each["image"]) + " morning" * 9} for each in data]
    engines = in_pieces(make_engine(tmp_path, **options), most=9), make_engine(tmp_path, **options)
    used = []
    for way in engines[0].executor.worker.runner.ways:
        way.run = lambda batch, way=way, run=way.run: used.append(type(way).__name__) or run(batch)
    found = []
    for engine in engines:
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt | {"multi_modal_data": data[index]}, MIXED[index])
        done = [output for _ in range(100) for output in engine.step() if output.finished]
        found.append({output.request_id: output.outputs[0].token_ids for output in done})
    assert len(found[0]) == 3 and found[0] == found[1]
    assert set(used) == {"PlainGraphs", "PiecewiseGraphs", "Eager"}


@pytest.mark.usefixtures("uncompiled")
def test_replayed_pieces_give_the_same_tokens_and_nothing_else_is_computed(model, fake_cuda):
    options = {"max_num_batched_tokens": 20}
    expected = outputs_of(make_engine(model, **options))
    engine = in_pieces(make_engine(model, **options), most=20)
    pieces = capture(engine)
    assert list(pieces.graphs) == [20, 16, 8], "the largest first"
    assert [len(graphs) for graphs in pieces.graphs.values()] == [3, 3, 3], "one for each layer"
    del fake_cuda[:]
    assert outputs_of(engine) == expected
    assert fake_cuda == [], "no piece is launched"
    replays = {size: {graph.replays for graph in graphs} for size, graphs in pieces.graphs.items()}
    assert all(len(counts) == 1 for counts in replays.values()), "all layers of a step"
    assert max(replays[20]) > 0
    assert outputs_of(engine) == expected, "nothing of an earlier step is left over"


@pytest.mark.usefixtures("uncompiled")
def test_a_graph_reads_what_the_previous_one_has_written(model, fake_cuda):
    pieces = capture(in_pieces(make_engine(model), most=32))
    for graphs in pieces.graphs.values():
        for previous, graph in pairwise(graphs):
            (carried,) = graph.piece.args
            assert carried is previous.outputs


@pytest.mark.usefixtures("uncompiled")
def test_padding_and_capturing_write_to_no_sequence(model, fake_cuda):
    engine = in_pieces(make_engine(model, enable_prefix_caching=False), most=32)
    cache = engine.executor.worker.kv_cache.tensor.zero_()
    capture(engine)
    assert not cache.any()
    for i in range(3):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()  # 9 tokens, padded to 16
    used = {block for table in engine.scheduler.block_manager.block_tables.values() for block in table}
    assert {block for block in range(cache.shape[2]) if cache[:, :, block].any()} == used
    assert len(used) == 3


@pytest.mark.usefixtures("uncompiled")
def test_log_probabilities_of_prompts_are_those_of_an_eager_step(model):
    def tables(engine):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2, logprobs=2)
        engine.add_request("a", [5, 6, 7, 8, 9], params)
        output = finish(engine)["a"]
        return [{i: p.logprob for i, p in table.items()} for table in output.prompt_logprobs[1:]]

    for ours, plain in zip(tables(in_pieces(make_engine(model))), tables(make_engine(model)), strict=True):
        assert ours == pytest.approx(plain, abs=1e-12)


@pytest.mark.usefixtures("uncompiled")
def test_what_fits(model):
    pieces = pieces_of(in_pieces(make_engine(model), most=20))
    assert pieces.fits(Batch(rows=[0, 1], starts=[3, 0], counts=[1, 19]))
    assert not pieces.fits(Batch(rows=[0, 1], starts=[3, 0], counts=[1, 20]))


@pytest.mark.interpreter
@pytest.mark.usefixtures("uncompiled")
def test_what_a_layer_launches_beside_compiled_code(model, fake_cuda, monkeypatch):
    """One kernel in the graph, and between graphs only attention, without torch's dispatcher."""
    launches = []

    class Listed(set):
        def add(self, launch):
            launches.append(launch[0])

    record_launches(monkeypatch, Listed())
    engine = in_pieces(make_engine(model), most=8, uses_triton=True)
    pieces, layers = pieces_of(engine), 3
    pieces.capture(pieces.sizes, "pool")
    assert launches == ["rotate_kernel"] * 2 * layers, "warmed up, and captured"
    del launches[:]
    for graph in pieces.graphs[8]:
        graph.replay = lambda: launches.append("replay")
    engine.executor.worker.kv_cache.clear([0])
    batch = Batch(rows=[0, 1], starts=[4, 0], counts=[1, 3], sampled_from=[0], sampled_rows=[0])
    with torch.inference_mode():
        pieces._forward(*prepare(batch, pieces.table, pieces.kv_cache, pieces.make_attention))
    assert launches == ["replay", "decode_kernel", "prefill_kernel"] * layers


FAMILIES = [
    ("qwen2", {}),
    ("gemma2", {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 9}),
    ("phi3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.75}}),
    ("smollm3", {"no_rope_layer_interval": 2}),
    ("ministral3", {"rope_parameters": TEMPERATURE}),
    ("llama", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 5}),
    ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("olmo2", {}),
    ("olmo3", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("gpt_oss", {}),
    ("glm4", {}),
]


@pytest.mark.interpreter
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("family", "overrides"),
    FAMILIES if LONG else FAMILIES[:3],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_logits_with_the_triton_kernels(family, overrides, tmp_path):
    """Norms of heads, biases, windows and scores; decodes beside chunks; in pieces and by the compiled model itself."""
    lengths = [9, 3, 1, 14] if LONG else [6, 3, 1, 9]
    hf_model = tiny_hf_model(family, num_hidden_layers=2, **overrides)
    hf_model.save_pretrained(tmp_path)
    config, sequences = loader.read_config(tmp_path), random_tokens(lengths)

    def make_attention(plain):
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        return paged_attention.make_attention(plain, *sizes, torch.float64)

    paged = Paged(tmp_path, sequences, torch.float64)
    model = CompiledDecoder(paged.model)
    made = model, paged.cache, paged.table
    for way in (PiecewiseGraphs(*made, make_attention, 32), Eager(*made, make_attention)):
        paged.way = way
        while any(paged.done(i) < length for i, length in enumerate(lengths)):
            left = {i: length - paged.done(i) for i, length in enumerate(lengths) if paged.done(i) < length}
            paged.step({i: min(n, 1 if i == 0 else 5) for i, n in left.items()})
        if family == "gpt_oss":
            hf_model.set_experts_implementation("eager")  # others do not compute in float64
        assert_all_close(paged.logits, reference_logits(hf_model.double(), sequences), 1e-5)
        paged.restart(sequences)


@pytest.mark.interpreter
def test_nothing_is_compiled_while_serving(model, fake_cuda, monkeypatch, compiled_graphs):
    """By Dynamo, of which a backend counts the graphs, or by Triton, for constants that a kernel has not had before."""
    variants = set()
    record_launches(monkeypatch, variants)
    monkeypatch.setattr(paged_attention, "num_processors", lambda device: 132)
    monkeypatch.setattr(paged_attention, "SPLIT_TOKENS", 32)  # a short context is split, too
    engine = make_engine(model, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=40)
    worker = engine.executor.worker
    setup = worker.setup
    compiled = compile_model(worker.model, setup.model_config, setup.dtype, setup.device)
    assert len(compiled_graphs) == 8
    made, make_attention = (compiled, worker.kv_cache, worker.runner.table), worker.setup.make_attention
    worker.runner.ways = [PiecewiseGraphs(*made, make_attention, 24), Eager(*made, make_attention)]
    capture(engine)
    assert {name for name, *_ in variants} == {"rotate_kernel"}, "attention is not captured"
    worker._warm_up()
    assert len(variants) == 5, "rotation, decodes that are split or not, the merge of splits, prompts"
    before = len(compiled_graphs), set(variants)
    with torch.compiler.set_stance("fail_on_recompile"):
        for name, prompt, params in (
            ("beside", [3, 4], {"max_tokens": 3}),
            ("long", [1] * 50, {"max_tokens": 3}),
            ("twice", [5], {"n": 2, "temperature": 1.0, "max_tokens": 2}),
        ):
            engine.add_request(name, prompt, SamplingParams(**{"temperature": 0, "ignore_eos": True} | params))
        while engine.has_unfinished_requests():
            assert not any(output.error for output in engine.step())
    assert (len(compiled_graphs), variants) == before


@pytest.mark.usefixtures("uncompiled")
def test_memory_that_runs_out_while_capturing_is_an_error_that_says_what_helps(model, fake_cuda, monkeypatch):
    @contextmanager
    def failing(graph, pool):
        raise RuntimeError(message)
        yield

    monkeypatch.setattr(torch.cuda, "graph", failing)
    pieces = pieces_of(in_pieces(make_engine(model), most=16))
    message = "CUDA out of memory"
    with pytest.raises(MemoryError, match=r"graphs of 16 tokens .*gpu_memory_utilization.*enforce_eager"):
        pieces.capture(pieces.sizes, "pool")
    message = "operation not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match="not permitted"):
        pieces.capture(pieces.sizes, "pool")
