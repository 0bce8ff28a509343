"""Whisper against transformers: the encoder, the logits of every position, and what the engine makes of several prompts
with different sound."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CPU, LONG, ForkedLink, Paged, assert_all_close, finish, random_tokens, save_tokenizer, tiny_whisper
from test_models import all_decoded_together, chunks_and_decodes_mixed, each_alone_then_decoded, packed

from nanopage import LLM, BeamSearchParams, SamplingParams
from nanopage.audio.mel import log_mel
from nanopage.checks.fields import MAX_SIZES
from nanopage.cpu import aot, aot_chain, aot_compile, aot_parts
from nanopage.cpu.tiled import TiledWeight
from nanopage.items.encoded import WriteEncoded
from nanopage.items.items import make_item
from nanopage.items.rows import ItemRows
from nanopage.layers.linear import Linear
from nanopage.reading.config import config_from_dict
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {
    "whisper": {},
    "more mel bins, other heads": {"num_mel_bins": 128, "encoder_attention_heads": 8, "decoder_attention_heads": 2},
    "scaled embeddings, a head of its own": {"scale_embedding": True, "tie_word_embeddings": False},
    "SiLU, fewer layers": {"activation_function": "silu", "encoder_layers": 1, "decoder_layers": 1},
}
LENGTHS = [1, 9, 40]


def save(directory, hf_model):
    hf_model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def sounds(count, seconds=3):
    """Noise of different colours and volumes."""
    rng = np.random.default_rng(1)
    noises = [np.cumsum(rng.normal(size=seconds * 16000) * 0.1 ** (i + 1)) * 0.01 for i in range(count)]
    return [np.clip(noise, -1, 1).astype(np.float32) for noise in noises]


class Hearing(Paged):
    """Paged, where each sequence has a spectrogram."""

    def __init__(self, directory, sequences, spectrograms, make_way=None):
        super().__init__(directory, sequences, make_way=make_way)
        self.spectrograms = spectrograms
        self.table.items = ItemRows(loader.read_config(directory), self.model.encoders, torch.float32, CPU)
        self.way = WriteEncoded(self.table.items, self.way)

    def batch(self, num_tokens):
        batch = super().batch(num_tokens)
        for new in batch.new:
            new.items = [make_item("audio", 0, 0, {"spectrogram": self.spectrograms[new.row]}, cost=1500)]
        return batch


def compiled(*made):
    return aot.Compiled(*made, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_the_encoder_and_the_logits_of_every_position_equal_transformers(tmp_path, case):
    hf_model, sequences = tiny_whisper(**CASES[case]), random_tokens(LENGTHS)
    spectrograms = [log_mel(sound, hf_model.config.num_mel_bins) for sound in sounds(len(LENGTHS))]
    save(tmp_path, hf_model)
    made = Hearing(tmp_path, sequences, spectrograms)
    encoded, expected = [], []
    with torch.inference_mode():
        for tokens, spectrogram in zip(sequences, map(torch.from_numpy, spectrograms), strict=True):
            outputs = hf_model(spectrogram[None], decoder_input_ids=torch.tensor([tokens]))
            encoded.append(made.model.encoders["audio"]({"spectrogram": spectrogram[None]})[0])
            expected.append((outputs.encoder_last_hidden_state[0], outputs.logits[0]))
    assert_all_close(encoded, [states for states, _ in expected])
    for plan in (each_alone_then_decoded, all_decoded_together, chunks_and_decodes_mixed):
        made.restart(sequences)
        assert_all_close(made.run(plan), [logits for _, logits in expected])
    if case == "whisper":
        assert_all_close(Hearing(tmp_path, sequences, spectrograms, packed).run(plan), made.logits)
        shuffled = Hearing(tmp_path, sequences, spectrograms[::-1]).run(plan)
        assert not torch.allclose(shuffled[0], made.logits[0], atol=0.1)  # the sound matters


def test_compiled_layers_can_be_exported_for_any_number_of_sequences(tmp_path, monkeypatch):
    exported = {}

    def export(module, inputs, dims, file, options):
        program = torch.export.export(module, (*inputs,), dynamic_shapes=(*dims,), strict=False)
        exported[file.name] = next(iter(program.graph.nodes)).meta["val"].shape[0]

    monkeypatch.setattr(aot_compile, "_export", export)
    made = Hearing(save(tmp_path, tiny_whisper()), random_tokens(LENGTHS), [], compiled)
    for name in [name for name, (part, _) in made.way.way.files.items() if part.endswith(aot_parts.CROSS)]:
        aot_compile.make_part(made.way.way.spec, made.way.way.config, tmp_path, name)
    fixed = {name for name, size in exported.items() if not isinstance(size, torch.SymInt)}
    assert fixed == {"before-cross-one.so", "after-cross-one.so"}
    assert exported.keys() - fixed == {"before-cross-many.so", "after-cross-many.so"}


def test_loading_asks_for_no_other_code_than_is_compiled(tmp_path):
    """None for prompts, in which cross-attention is attention and not a state."""
    way = Hearing(save(tmp_path, tiny_whisper()), random_tokens(LENGTHS), [], compiled).way.way
    code = {what: SimpleNamespace(functions=(aot_chain._Function * 1)()) for what in way.files.values()}
    layers = way._make_layers(None, code)
    assert layers.prompts == {} and not any(layers.have_state)


@pytest.mark.skipif(not LONG, reason="compiles for 40 s; runs with NANOPAGE_LONG_TESTS=1")
def test_compiled_layers_equal_the_eager_ones(tmp_path, monkeypatch):
    monkeypatch.delenv("NANOPAGE_COMPILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sequences, spectrograms = random_tokens(LENGTHS), [log_mel(sound) for sound in sounds(len(LENGTHS))]
    directory = save(tmp_path / "model", tiny_whisper())
    eager = Hearing(directory, sequences, spectrograms, packed).run(all_decoded_together)
    made = Hearing(directory, sequences, spectrograms, compiled)
    made.way.way.compile()
    for rows in (64, 2):  # from so many rows on, the threads divide steps
        monkeypatch.setattr(aot_chain, "PART_ROWS", rows)
        for plan in (each_alone_then_decoded, all_decoded_together, chunks_and_decodes_mixed):
            made.restart(sequences)
            assert_all_close(made.run(plan), eager)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory, and what transformers' greedy search makes of prompts with sound, in float64."""
    hf_model, directory = tiny_whisper(seed=1), tmp_path_factory.mktemp("whisper")
    save(directory, hf_model)
    hf_model.double()
    prompts = [
        {"prompt_token_ids": tokens, "multi_modal_data": {"audio": (sound, 16000)}}
        for tokens, sound in zip(random_tokens([3, 20, 4, 11]), sounds(4), strict=True)
    ]
    return directory, prompts, [greedy(hf_model, prompt) for prompt in prompts]


@torch.inference_mode()
def greedy(hf_model, prompt, count=24):
    features = torch.from_numpy(log_mel(prompt["multi_modal_data"]["audio"][0])).double()[None]
    encoded, tokens = hf_model.model.encoder(features), list(prompt["prompt_token_ids"])
    for _ in range(count):
        logits = hf_model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[-count:]


# Two sequences take four blocks. The last two prompts go first, and take the blocks of the others.
PRIORITIES = {"scheduling_policy": "priority", "num_gpu_blocks_override": 5}
OPTIONS = {
    "all at once": {},
    "in chunks": {"max_num_batched_tokens": 4},
    "recomputed": PRIORITIES | {"preemption_mode": "recompute"},
    "swapped": PRIORITIES | {"preemption_mode": "swap"},
    "with drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_answers_are_those_of_transformers_alone(model, name):
    directory, prompts, expected = model
    llm = LLM(directory, dtype="float64", enforce_eager=True, max_num_seqs=4, **OPTIONS[name])
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = {}
    for index, prompt in enumerate(prompts):
        priority = int(index < 2) if "scheduling_policy" in OPTIONS[name] else 0
        engine.add_request(str(index), prompt, params, priority)
        for _ in range(4 if index == 1 else 0):
            answers |= {output.request_id: output for output in engine.step()}
    answers |= finish(engine)
    assert [list(answers[str(index)].outputs[0].token_ids) for index in range(4)] == expected
    assert (engine.scheduler.queues.num_preemptions > 0) == ("scheduling_policy" in OPTIONS[name])


def test_completions_and_beams_share_the_sound_of_their_prompt(model):
    directory, prompts, _ = model
    llm = LLM(directory, dtype="float64", enforce_eager=True, max_num_seqs=4)
    several = [SamplingParams(n=3, temperature=1, seed=seed, max_tokens=8, ignore_eos=True) for seed in (3, 4)]
    together = llm.generate(prompts[:2], several)
    apart = [llm.generate(prompt, params)[0] for prompt, params in zip(prompts[:2], several, strict=True)]
    for one, other in zip(together, apart, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
    alone = llm.beam_search(prompts[0], BeamSearchParams(beam_width=3, max_tokens=8))[0]
    beside = llm.beam_search([prompts[1], prompts[0]], BeamSearchParams(beam_width=3, max_tokens=8))[1]
    assert [beam.tokens for beam in alone.sequences] == [beam.tokens for beam in beside.sequences]


SIZES = (
    *("d_model", "encoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_ffn_dim", "num_mel_bins", "max_source_positions", "max_target_positions"),
    "median_filter_width",
)
SOUND = (np.zeros(16000, np.float32), 16000)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("a", ValueError, "the prompt has no multi_modal_data, and whisper.* needs it"),
        ({"prompt_token_ids": [1]}, ValueError, "the prompt has no multi_modal_data"),
        ({"prompt": "a", "multi_modal_data": {"image": SOUND}}, ValueError, "multi_modal_data must be .'audio'"),
        ({"prompt": "a", "multi_modal_data": {"audio": [SOUND, SOUND]}}, ValueError, "one audio of a prompt, not 2"),
        ({"prompt": "a", "multi_modal_data": {"audio": SOUND[0]}}, TypeError, "a pair of samples"),
        ({"prompt": "a", "multi_modal_data": {"audio": (SOUND[0], 8000)}}, ValueError, "8000 samples a second"),
        ({"prompt": "a", "multi_modal_data": {"audio": ([0.0], 16000)}}, TypeError, "an array of floats"),
        ({"prompt": "a", "multi_modal_data": {"audio": (SOUND[0][None], 16000)}}, ValueError, r"must be float32 \[N\]"),
        ({"prompt": "a", "multi_modal_data": {"audio": (SOUND[0] + np.inf, 16000)}}, ValueError, "must be finite"),
        ({"prompt": "a", "multi_modal_data": {"audio": (np.zeros(480001), 16000)}}, ValueError, "at most 480,000"),
    ],
    ids=str,
)
def test_prompts_that_are_refused(model, prompt, error, words, request):
    llm = request.getfixturevalue("llm")
    with pytest.raises(error, match=words):
        llm.generate(prompt)


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model[0], enforce_eager=True)


def test_text_gets_no_special_tokens_and_silence_is_a_sound(llm):
    (output,) = llm.generate({"prompt": "ab", "multi_modal_data": {"audio": SOUND}}, SamplingParams(max_tokens=2))
    assert output.prompt_token_ids == llm.get_tokenizer().encode("ab", add_special_tokens=False)
    assert len(output.outputs[0].token_ids) >= 1


def test_int8_rounds_every_linear_layer_of_encoder_and_decoder(model):
    """Nothing else: convolutions, norms and positions stay floats."""
    directory, prompts, _ = model
    exact = loader.load_model(directory, loader.read_config(directory), torch.float32, CPU).encoders["audio"]
    llm = LLM(str(directory), quantization="int8", dtype="float32", enforce_eager=True)
    rounded = llm.engine.executor.worker.model
    layers = {name: layer for name, layer in rounded.named_modules() if isinstance(layer, Linear)}
    assert all(isinstance(layer.weight, TiledWeight) for layer in layers.values())
    assert sum(name.startswith("encoders.audio.layers.") for name in layers) == 2 * 4
    payload = {"spectrogram": torch.from_numpy(log_mel(sounds(1)[0]))[None]}
    wanted, got = exact(payload), rounded.encoders["audio"](payload)
    assert 0 < (got - wanted).norm() / wanted.norm() < 0.05
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not work with WhisperForConditionalGeneration"),
        ({"enable_lora": True}, "enable_lora"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
        ({"kv_cache_dtype": "fp8", "enforce_eager": True}, "kv_cache_dtype='fp8'"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_by_name(model, options, named, monkeypatch):
    monkeypatch.setattr("nanopage.distributed.process_executor.ProcessLink", ForkedLink)
    with pytest.raises(ValueError, match=named):
        LLM(str(model[0]), **options)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"d_model": 65}, "d_model 65 is not a multiple of decoder_attention_heads=4"),
        ({"encoder_attention_heads": 7}, "d_model 64 is not a multiple of encoder_attention_heads=7"),
        ({"num_mel_bins": 81}, "num_mel_bins 81 is not supported; supported: 80, 128"),
        ({"max_source_positions": 750}, "max_source_positions 750 is not supported; supported: 1500"),
        ({"median_filter_width": 6}, "median_filter_width must be odd, got 6"),
        ({"activation_function": "tanh"}, "activation_function 'tanh' is not supported"),
        ({"decoder_layers": 2**9 + 1}, "decoder_layers must be at most 512"),
        *(({name: 10**9}, f"{name} must be at most {MAX_SIZES[name]:,}") for name in SIZES),
        ({"eos_token_id": 300}, "eos_token_id 300 is not in the vocabulary"),
    ],
    ids=str,
)
def test_fields_that_are_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        config_from_dict(
            tiny_whisper().config.to_dict() | {"architectures": ["WhisperForConditionalGeneration"]} | fields
        )
