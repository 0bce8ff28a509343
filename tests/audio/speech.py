"""A tiny Whisper with random weights, and an engine that runs it with transformers, for tests of what is around it."""

import asyncio
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import soundfile
import torch
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import WhisperConfig, WhisperForConditionalGeneration

from nanopage.audio import WHISPER
from nanopage.audio.languages import LANGUAGES
from nanopage.audio.mel import log_mel
from nanopage.audio.sampler import prefer_timestamps
from nanopage.audio.words import Word
from nanopage.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanopage.text.tokenizer import Tokenizer

END = 300  # the first special token
SPECIAL = [
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>"),
    *("<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
    *(f"<|{index * 0.02:.2f}|>" for index in range(1501)),
]
IDS = {token: END + index for index, token in enumerate(SPECIAL)}
SUPPRESSED = [4, 7, 11, *range(END + 1, IDS["<|0.00|>"])]


def write_whisper(directory, seed=0):
    """Save the model with its tokenizer. Returns the directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [
        *alphabet,
        *(f"Ġ{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
        *(f"x{i}" for i in range(18)),
    ]
    backend = BackendTokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    config = WhisperConfig(
        vocab_size=END + len(SPECIAL),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_target_positions=200,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=END + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():  # larger logits, so that texts differ from window to window
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    model.save_pretrained(directory)
    backend.save(str(directory / "tokenizer.json"))
    fields = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {task: IDS[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "prev_sot_token_id": IDS["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "suppress_tokens": SUPPRESSED,
        **{name: getattr(config, name) for name in ("eos_token_id", "bos_token_id", "pad_token_id")},
        "decoder_start_token_id": END + 1,
    }
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


def fake_engine(directory, max_model_len):
    config = SimpleNamespace(architecture=WHISPER, vocab_size=END + len(SPECIAL), encoders={})
    reader = SimpleNamespace(prompts=SimpleNamespace(path=directory))
    tokenizer = Tokenizer(directory)
    return SimpleNamespace(
        tokenizer=tokenizer, model_config=config, max_model_len=max_model_len, input_processor=reader, dead_error=None
    )


class TransformersLLM:
    """Answers as an AsyncLLM does, token by token with transformers.

    features: makes the encoder's input of a window. requests: those so far, (prompt token ids, SamplingParams).
    """

    def __init__(self, directory):
        self.model = WhisperForConditionalGeneration.from_pretrained(directory).eval().requires_grad_(False)
        self.engine = fake_engine(directory, self.model.config.max_target_positions)
        self.features, self.requests = log_mel, []

    async def in_thread(self, function, *args):
        return function(*args)

    @torch.inference_mode()
    async def generate(self, prompt, params, request_id):
        self.requests.append((prompt["prompt_token_ids"], params))
        samples, rate = prompt["multi_modal_data"]["audio"]
        assert rate == 16_000 and samples.dtype == np.float32
        encoded = self.model.model.encoder(torch.from_numpy(self.features(samples))[None])
        tokens, tables = [], []
        mask = params.structured_outputs.make_mask([])
        generator = torch.Generator().manual_seed(params.seed)
        room = self.engine.max_model_len - len(prompt["prompt_token_ids"])
        while len(tokens) < min(params.max_tokens, room) and (not tokens or tokens[-1] != END):
            ids = torch.tensor([[*prompt["prompt_token_ids"], *tokens]])
            logits = self.model(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1].float()
            bits = np.unpackbits(np.frombuffer(mask.allowed(tokens), np.uint8), bitorder="little")
            changed = logits.masked_fill(torch.from_numpy(bits[: logits.shape[1]] == 0), -torch.inf)
            prefer_timestamps(changed, torch.tensor([True]))
            if params.temperature:
                chances = (changed[0] / params.temperature).softmax(-1)
                token = int(torch.multinomial(chances, 1, generator=generator))
            else:
                token = int(changed.argmax())
            logprobs = (changed if tokens else logits)[0].log_softmax(-1)
            listed = [token] if tokens else [token, *logprobs.topk(params.logprobs)[1].tolist()]
            tables.append({token_id: Logprob(float(logprobs[token_id])) for token_id in listed})
            tokens.append(token)
        yield output_of(prompt, tokens, tables, request_id)


class ScriptedLLM(TransformersLLM):
    """Answers with what a test says.

    answers: for each request, in order: (tokens of the output, log-probability of each, probability of no speech). No
        request is answered while `waits`. num_aborted: requests that were given up while they waited.
    """

    dead_error = None

    def __init__(self, directory, answers):
        self.engine, self.requests, self.answers = fake_engine(directory, 64), [], list(answers)
        self.engine_thread = SimpleNamespace(num_waiting=0, num_waiting_tokens=0)
        self.waits, self.num_aborted, self.salts = False, 0, []

    async def in_thread(self, function, *args):
        return await asyncio.to_thread(function, *args)

    async def generate(self, prompt, params, request_id):
        self.requests.append((prompt["prompt_token_ids"], params))
        self.salts.append(prompt["cache_salt"])
        try:
            while self.waits:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        if not self.answers:
            yield RequestOutput(request_id, None, [], [], True, RequestMetrics(0.0), error="no answer is left")
            return
        tokens, logprob, no_speech = self.answers.pop(0)
        tables = [{token: Logprob(logprob)} for token in tokens]
        tables[0][IDS["<|nospeech|>"]] = Logprob(math.log(no_speech))
        yield output_of(prompt, tokens, tables, request_id)


class FakeAligner:
    """Says that each text of a window is one word, and takes half a second."""

    def __init__(self, llm, tokens):
        self.decode = llm.engine.tokenizer.decode

    async def find(self, samples, said, language, task):
        return [[Word(self.decode(text), index / 2, index / 2 + 0.5)] for index, text in enumerate(said)]


def output_of(prompt, tokens, tables, request_id):
    completion = CompletionOutput(0, "", tokens, logprobs=tables, finish_reason="stop")
    return RequestOutput(request_id, None, prompt["prompt_token_ids"], [completion], True, RequestMetrics(0.0))


def sound(seconds, rate=16_000, seed=0):
    """Noise whose loudness changes from second to second: float32 [N]."""
    rng = np.random.default_rng(seed)
    loudness = np.repeat(rng.uniform(0.1, 1, int(seconds) + 1), rate)[: int(seconds * rate)]
    return (rng.normal(0, 0.1, int(seconds * rate)) * loudness).astype(np.float32)


def encoded(samples, rate=16_000, **format):
    """The content of a sound file. Without a `format`: WAV with 16 bits."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **({"format": "WAV", "subtype": "PCM_16"} | format))
    return file.getvalue()
