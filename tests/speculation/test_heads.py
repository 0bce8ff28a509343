"""Heads that draft from the model's hidden states (nanopage/speculation/heads.py), beside the same in plain torch."""

import json
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from draft_heads import TAPS, count_on, count_with, save_eagle
from helpers import VOCAB_SIZE, random_tokens, tiny_hf_model, tiny_model
from safetensors.torch import load_file, save_file

from nanopage import LLM, EngineConfig, SamplingParams
from nanopage.checks.speculation import SpeculativeConfig
from nanopage.speculation.lookup import StepCosts, StepTimes
from nanopage.weights.loader import read_config

OPTIONS = {"dtype": "float64", "device": "cpu", "enforce_eager": True, "max_model_len": 128, "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=14, ignore_eos=True, n=2, repetition_penalty=1.1)
PROMPTS = random_tokens([5, 21, 3])
LAYERS, SIZE = 7, 32  # of the model with an EAGLE-3 head


class Unmeasured(StepCosts):
    def add(self, num_rows, num_drafted, seconds): ...

    def of(self, num_rows):
        return None


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Drafts of full length in every step that may have some."""
    monkeypatch.setattr("nanopage.speculation.lookup.LEAST_SPEEDUP", 0.0)
    monkeypatch.setattr("nanopage.speculation.head_drafter.EXPECTED_TOKEN", 0.0)
    monkeypatch.setattr("nanopage.speculation.head_drafter.StepCosts", Unmeasured)
    monkeypatch.setattr("nanopage.speculation.lookup.MOST_LOSS", 1e9)
    monkeypatch.setattr("nanopage.speculation.lookup.StepCosts.of", lambda costs, num_rows: StepTimes(1.0, 0, 0.0))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS, hidden_size=SIZE)


def load(model, method=None, head=None, length=3, **options) -> LLM:
    if method is not None:
        options["speculative_config"] = {"method": method, "num_speculative_tokens": length}
    if head is not None:
        options["speculative_config"]["model"] = str(head)
    return LLM(str(model), **OPTIONS | options)


def run(llm, params=GREEDY, prompts=PROMPTS):
    """The tokens of all completions, and the drafts by the tokens before them."""
    drafts = {}
    if llm.engine.scheduler.drafts is not None:
        drafter = llm.engine.scheduler.drafts.drafter
        propose = drafter.propose

        def noting(decodes, most, schedule):
            found = propose(decodes, most, schedule)
            drafts.update({tuple(seq.token_ids): draft for seq, draft in found.items()})
            return found

        drafter.propose = noting
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs], drafts


def accepted_share(llm):
    acceptance = llm.engine.scheduler.drafts.drafter.gains.acceptance[0]
    return acceptance.accepted / acceptance.tried


def rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x, theta=10000.0):
    """x [heads, T, head_dim], rotated by its positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()), dim=-1)


def eagle_drafts(hf_model, head, config, token_ids, length):
    """What an EAGLE-3 head guesses after these tokens, all positions computed anew for each token."""
    w = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in head.items()}
    with torch.inference_mode():
        hidden = hf_model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states
    taps = config.get(TAPS, (2, LAYERS // 2, LAYERS - 3))
    states = torch.cat([hidden[tap][0] for tap in taps], dim=-1) @ w["fc.weight"].T
    states, ids, mid = states[:-1], list(token_ids[1:]), "midlayer.self_attn"
    embed = w.get("embed_tokens.weight", hf_model.get_input_embeddings().weight)
    for _ in range(length):
        embeds = rms_norm(embed[ids], w["midlayer.input_layernorm.weight"])
        normed = rms_norm(states, w["midlayer.hidden_norm.weight"])
        x = torch.cat((embeds, normed), dim=-1)
        q, k, v = (x @ w[f"{mid}.{part}_proj.weight"].T for part in "qkv")
        q, k, v = (each.unflatten(-1, (-1, 8)).transpose(0, 1) for each in (q, k, v))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        out = F.scaled_dot_product_attention(rotated(q)[None], rotated(k)[None], v[None], is_causal=True)[0]
        residual = normed if config.get("norm_before_residual") else states
        x = residual + out.transpose(0, 1).flatten(1) @ w[f"{mid}.o_proj.weight"].T
        y = rms_norm(x, w["midlayer.post_attention_layernorm.weight"])
        gate, up = (y @ w[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        best = int((rms_norm(x[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
        ids.append(best + int(w["d2t"][best]))
        states = torch.cat((states, x[-1:]))
    return ids[-length:]


HEADS = {
    "published": {"num_logits": 100},
    "other layers, embeddings": {"seed": 1, TAPS: [0, LAYERS - 1], "norm_before_residual": True},
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_of_an_eagle_head_are_those_of_its_formula(target, tmp_path, name):
    def add_embeddings(tensors):
        if name != "published":
            tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, SIZE)

    head = save_eagle(tmp_path, SIZE, change=add_embeddings, **HEADS[name])
    hf_model = tiny_hf_model(num_hidden_layers=LAYERS, hidden_size=SIZE).double()
    found, drafts = run(load(target, "eagle3", head, max_num_batched_tokens=8))
    assert found == run(load(target))[0]
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    assert len(drafts) > 25
    for token_ids, draft in drafts.items():
        assert draft == eagle_drafts(hf_model, tensors, config, token_ids, len(draft)), len(token_ids)


MTP = {  # family: fields of the model, and those of a model of one layer that is the head's
    "qwen3_next": ({}, {"layer_types": ["full_attention"]}),
    "qwen3_5_text": ({"tie_word_embeddings": True}, {"layer_types": ["full_attention"]}),
    "deepseek_v3": ({}, {"first_k_dense_replace": 0}),
    "glm4_moe": ({}, {"first_k_dense_replace": 0}),
}


def add_mtp(directory, hf_head, of_qwen, change=lambda tensors: None):
    """Add the tensors of an MTP head to a saved model: the layer and the norm of a model, and others. Returns: the
    others, as Qwen names them."""
    tensors = load_file(directory / "model.safetensors")
    num_layers, size = read_config(directory).num_layers, hf_head.config.hidden_size
    generator, place = torch.Generator().manual_seed(5), "mtp" if of_qwen else f"model.layers.{num_layers}"
    norms = {f"pre_fc_norm_{part}": torch.randn(size, generator=generator) * 0.3 for part in ("embedding", "hidden")}
    others = {name: norm + (not of_qwen) for name, norm in norms.items()}
    others["fc"] = torch.randn(size, 2 * size, generator=generator) * 0.3
    change(others)
    theirs = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj"}
    for name, tensor in others.items():
        tensors[f"{place}.{name if of_qwen else theirs[name]}.weight"] = tensor
    for name, tensor in hf_head.state_dict().items():
        if name == "model.norm.weight":
            tensors[f"{place}.norm.weight" if of_qwen else f"{place}.shared_head.norm.weight"] = tensor
        elif name.startswith("model.layers.0."):
            inner = name.removeprefix("model.layers.0.")
            tensors[f"{place}.layers.0.{inner}" if of_qwen else f"{place}.{inner}"] = tensor
    if not of_qwen:
        tensors[f"{place}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{place}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return others


def mtp_drafts(hf_model, hf_head, others, offset, token_ids, length):
    """As `eagle_drafts`, of an MTP head."""
    head, eps = hf_model.get_output_embeddings().weight, hf_model.config.rms_norm_eps
    norm = [others[f"pre_fc_norm_{part}"].double() + offset for part in ("embedding", "hidden")]
    ids = list(token_ids[1:])
    with torch.inference_mode():
        states = hf_model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        states = states[:-1]
        for _ in range(length):
            parts = hf_model.get_input_embeddings().weight[ids], states
            parts = [F.rms_norm(part, part.shape[-1:], weight, eps) for part, weight in zip(parts, norm, strict=True)]
            x = torch.cat(parts, dim=-1) @ others["fc"].double().T
            out = hf_head(inputs_embeds=x[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1:]
            states = torch.cat((states, out))
            ids.append(int((out @ head.T).argmax()))
    return ids[-length:]


@pytest.mark.parametrize("family", MTP)
def test_drafts_of_an_mtp_head_are_those_of_its_formula(tmp_path, family):
    fields, of_head = MTP[family]
    of_qwen = family.startswith("qwen")
    model = tiny_model(tmp_path, family, **fields)
    hf_model = tiny_hf_model(family, **fields).double()
    hf_head = tiny_hf_model(family, seed=1, num_hidden_layers=1, **fields, **of_head)
    for each in (hf_model, hf_head):
        each.set_experts_implementation("eager")  # others do not compute in float64
    others = add_mtp(model, hf_head, of_qwen)
    llm = load(model, "mtp", block_size=8)
    found, drafts = run(llm)
    assert found == run(load(model, block_size=8))[0]
    assert len(drafts) > 25
    for token_ids, draft in list(drafts.items())[::3]:
        expected = mtp_drafts(hf_model, hf_head.double(), others, float(of_qwen), token_ids, len(draft))
        assert draft == expected, len(token_ids)


def right_eagle(directory):
    model = count_on(tiny_model(directory / "model", hidden_size=SIZE))
    return model, save_eagle(directory / "head", SIZE, change=count_with, **{TAPS: [2]})


def right_mtp(directory):
    """Qwen3.5, whose layers have a state, with a head that passes the embedding on."""
    model = count_on(tiny_model(directory, "qwen3_5_text"), norm=0.0)

    def pass_on(others):
        size = len(others["fc"])
        others["fc"].zero_()[:, :size] = torch.eye(size)
        for part in ("embedding", "hidden"):
            others[f"pre_fc_norm_{part}"].zero_()

    hf_head = tiny_hf_model("qwen3_5_text", num_hidden_layers=1, layer_types=["full_attention"])
    with torch.no_grad():
        for name, parameter in hf_head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "model.norm.weight")):
                parameter.zero_()
    add_mtp(model, hf_head, True, pass_on)
    return model, None


@pytest.mark.parametrize(("method", "make"), [("eagle3", right_eagle), ("mtp", right_mtp)], ids=["eagle3", "mtp"])
def test_a_head_that_is_always_right_is_accepted_whole(tmp_path, method, make):
    model, head = make(tmp_path)
    options = {"block_size": 8, "max_num_batched_tokens": 16}
    llm = load(model, method, head, length=4, **options)
    heads = llm.engine.executor.worker.wings.heads
    read = heads.read

    def reading(batch):
        read(batch)
        assert all(kept.untyped_storage().nbytes() == kept.nbytes for _, kept in heads.states.values())
        assert not {fork.row for fork in batch.forks} & heads.states.keys()  # nothing of the rows' previous sequences

    heads.read = reading
    found, drafts = run(llm)
    assert found == [[[(prompt[-1] + 1 + i) % VOCAB_SIZE for i in range(14)]] for prompt in PROMPTS]
    assert accepted_share(llm) == 1 and len(drafts) < 14
    assert run(llm, SAMPLED)[0] == run(load(model, **options), SAMPLED)[0]
    longer = [prompt + tokens[:-1] for prompt, (tokens,) in zip(PROMPTS, found, strict=True)]  # prefixes are cached
    assert run(llm, prompts=longer)[0] == run(load(model, **options), prompts=longer)[0]
    assert heads.works and not heads.states  # at rest


def test_a_head_that_fails_is_not_used_again(target, tmp_path, monkeypatch, caplog):
    head, expected = save_eagle(tmp_path, SIZE), run(load(target))[0]
    for method in ("read", "draft"):
        llm = load(target, "eagle3", head)
        worker = llm.engine.executor.worker
        calls, whole = [], getattr(worker.wings.heads, method)

        def failing(*arguments, whole=whole, calls=calls):
            calls.append(arguments)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return whole(*arguments)

        monkeypatch.setattr(worker.wings.heads, method, failing)
        with caplog.at_level(logging.WARNING):
            assert run(llm)[0] == expected
        assert len(calls) == 3 and "the head of speculative_config failed" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures .* is not supported; supported: Llama",
        ),
        ({"hidden_size": 64}, "hidden_size 64 is not supported; supported: 32"),
        ({"vocab_size": 77}, "vocab_size 77"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({TAPS: [1, LAYERS + 1, 2]}, f"must be a list of layers of the model, 0 to {LAYERS}"),
        ({TAPS: "last"}, "must be a list of layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"intermediate_size": 40}, "mis-shaped: midlayer.mlp.gate_proj.weight"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_heads_that_do_not_fit_are_refused(target, tmp_path, fields, message):
    head = save_eagle(tmp_path, SIZE)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=message):
        load(target, "eagle3", head)


def test_other_tensors_of_heads_are_refused(target, tmp_path):
    for change, message in (
        (lambda tensors: tensors.pop("fc.weight"), "missing: fc.weight"),
        (lambda tensors: tensors.pop("d2t"), "mis-shaped: lm_head.weight is .100"),
        (lambda tensors: tensors.update(d2t=torch.ones(2, 2)), "d2t must be I64"),
        (lambda tensors: tensors["d2t"].fill_(VOCAB_SIZE), "d2t must .* lead from each logit to one of 300"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "unexpected: extra"),
        (lambda tensors: tensors["fc.weight"].fill_(math.nan), "fc.weight has values that are NaN"),
    ):
        head = save_eagle(tmp_path, SIZE, num_logits=100, change=change)
        with pytest.raises(ValueError, match=message):
            load(target, "eagle3", head)


def test_methods_that_do_not_fit_the_model_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match=f"no tensors of a head, neither mtp.* nor model.layers.{LAYERS}"):
        load(target, "mtp")
    with pytest.raises(ValueError, match="method='eagle3' does not work with model_impl='transformers'"):
        load(target, "eagle3", save_eagle(tmp_path / "head", SIZE), model_impl="transformers")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(target, "eagle3", tmp_path / "nowhere")
    gemma = tiny_model(tmp_path / "gemma", "gemma3n_text")
    with pytest.raises(ValueError, match="its layers look up the tokens"):
        load(gemma, "eagle3", tmp_path / "head")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "eagle3"}, "method='eagle3' needs model"),
        ({"method": "mtp", "model": "x"}, "model is not for method='mtp'"),
        ({"method": "eagle3", "model": "x", "prompt_lookup_min": 2}, "prompt_lookup_min is not for"),
    ],
)
def test_options_that_do_not_fit_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict(values | {"num_speculative_tokens": 2})


@pytest.mark.parametrize("option", [{"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}])
def test_one_worker_in_this_process_only(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        EngineConfig(**option, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
