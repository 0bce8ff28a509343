"""Broken and hostile model files, by the hundreds: each loads or is a clean error that names it, in bounded memory.

A few of each kind run always. NANOPAGE_ATTACKS=1000 runs as many of each; with -s the counts are printed. A case that
fails prints its name: NANOPAGE_ATTACKS=gguf:17 runs it alone.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest
from attacks import CONTROLS, attack
from encoders import tiny_encoder, write_modules
from gguf import GGMLQuantizationType as Quantization
from helpers import tiny_hf_model, tiny_model
from programs import ROOT, forked
from test_gguf import MODELS, VOCABULARIES, llama3_divisors, model_for, write_gguf
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from nanopage import escaped
from nanopage.terminal.text import say_error

ATTACKS = os.environ.get("NANOPAGE_ATTACKS", "10")
KINDS = ["gguf", "safetensors", "json", "tokenizer", "gguf-values", "encoder", "strings", "encoder-strings"]
HANGS = 120  # seconds; a case takes some hundredths


def unigram_tokenizer() -> Tokenizer:
    """In the manner of T5, with one part of each kind."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((chr(code), -2.0) for code in range(33, 127))]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    return tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, list[str]]:
    """Good models by the kind of attack, as paths of directories."""
    root = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    base = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    gguf_files = {
        "llama": ("llama", "smollm", {}, {}),
        "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}, {"types": {"": Quantization.Q8_0}}),
        "sentencepiece": ("llama", "llama", {}, {"types": {"mlp": Quantization.Q4_1}}),
        "llama3": ("llama", "llama-bpe", base, {"rope_freqs": llama3_divisors(8, 500000.0, 8.0)}),
    }
    for name, (arch, vocabulary, overrides, options) in gguf_files.items():
        (root / name).mkdir()
        hf_model = model_for(VOCABULARIES[vocabulary], arch, **small | overrides)
        write_gguf(root / name / "m.gguf", hf_model, arch, VOCABULARIES[vocabulary], **options)
    families = ["gemma3", "olmo3, yarn", "phi3, longrope", "granite", "mixtral", "qwen2_moe"]
    for name in families:
        (root / name).mkdir()
        family, arch, overrides = MODELS[name]
        hf_model = model_for(VOCABULARIES["qwen2"], family, **overrides)
        write_gguf(root / name / "m.gguf", hf_model, arch, VOCABULARIES["qwen2"])
    tiny_model(root / "whole", **small)
    tiny_model(root / "sharded", **small)
    (root / "sharded" / "model.safetensors").unlink()
    tiny_hf_model(**small).save_pretrained(root / "sharded", max_shard_size="20KB")
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    tiny_model(root / "yarn", "qwen3", **small | {"head_dim": 8, "rope_parameters": scaling})
    tiny_model(root / "mistral", "mistral", "bfloat16", **small | {"sliding_window": 16})
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "eos_token_id": [2, 0], "bos_token_id": 1}
    for name in ("whole", "yarn", "mistral"):
        (root / name / "generation_config.json").write_text(json.dumps(sampling))
    tiny_model(root / "unigram", **small)
    unigram_tokenizer().save(str(root / "unigram" / "tokenizer.json"))
    directories = [str(root / name) for name in ("whole", "yarn", "mistral")]
    sharded = [str(root / name) for name in ("whole", "sharded")]
    with_tokenizers = [*directories, str(root / "unigram")]
    files = [str(root / name) for name in gguf_files]
    encoders = [
        write_modules(
            tiny_encoder(root / "bert"),
            sentence_bert_config={"max_seq_length": 32, "do_lower_case": False},
            config_sentence_transformers={"prompts": {"query": "the "}, "default_prompt_name": "query"},
        ),
        tiny_encoder(root / "reranker", "xlm-roberta", num_labels=1, type_vocab_size=1, max_position_embeddings=512),
        write_modules(tiny_encoder(root / "roberta", "roberta"), "pooling_mode_cls_token"),
        tiny_encoder(root / "classifier", "bert", num_labels=3),
    ]
    return {
        "gguf": files,
        "safetensors": sharded,
        "json": directories,
        "tokenizer": with_tokenizers,
        "gguf-values": [*files, *(str(root / name) for name in families)],
        "encoder": list(map(str, encoders)),
        "strings": [*with_tokenizers, sharded[1]],
        "encoder-strings": list(map(str, encoders)),
    }


def run(cases: list[str], models: dict[str, list[str]], directory: Path) -> dict[str, str]:
    """The outcome of each case. A process that dies or hangs is the outcome of the case it was at."""
    outcomes: dict[str, str] = {}
    while len(outcomes) < len(cases):
        rest = [case for case in cases if case not in outcomes]
        with open(directory / "stderr", "w+") as stderr:
            program = forked(ROOT / "tests" / "attacks.py", *rest, env=os.environ | {"RUST_BACKTRACE": "0"})
            process = subprocess.Popen(
                ["attacks.py"], preexec_fn=program,
                cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
            process.stdin.write(json.dumps(models))
            process.stdin.close()
            current = read_outcomes(process, outcomes)
            status = process.wait()
            stderr.seek(0)
            said = stderr.read()
            assert said == escaped(said)
            if status or current:
                assert current, said[-3000:]
                outcomes[current] = f"not clean: ended with {process.returncode}: {said[-300:]}"
    return outcomes


def read_outcomes(process: subprocess.Popen, outcomes: dict[str, str]) -> str | None:
    """Take in outcomes until the process ends, or is ended because it hangs. Returns the case it was at, if any."""
    current = None
    watchdog = threading.Timer(HANGS, process.kill)
    watchdog.start()
    for line in process.stdout:
        watchdog.cancel()
        entry = json.loads(line)
        current = None if "outcome" in entry else entry["case"]
        if current is None:
            outcomes[entry["case"]] = entry["outcome"]
        watchdog = threading.Timer(HANGS, process.kill)
        watchdog.start()
    watchdog.cancel()
    return current


@pytest.fixture(scope="module")
def outcomes(models, tmp_path_factory) -> dict[str, str]:
    cases = [ATTACKS] if ":" in ATTACKS else [f"{kind}:{seed}" for kind in KINDS for seed in range(int(ATTACKS))]
    return run(cases, models, tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_load_or_are_clean_errors(outcomes, kind):
    mine = {case: outcome for case, outcome in outcomes.items() if case.startswith(f"{kind}:")}
    if not mine:
        pytest.skip(f"only {ATTACKS} was asked for")
    counts = Counter("not clean" if outcome.startswith("not clean") else outcome for outcome in mine.values())
    print(f"\n{kind}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    assert {case: outcome for case, outcome in mine.items() if outcome.startswith("not clean")} == {}
    assert ":" in ATTACKS or (len(mine) == int(ATTACKS) and counts["ValueError"] > 0)


@pytest.mark.parametrize(
    ("model", "file", "old", "new"),
    [
        ("sharded", "model.safetensors.index.json", "model-00001", CONTROLS),
        ("sharded", "model.safetensors.index.json", "model-00001", "x" * 10**5),
        ("bert", "modules.json", "1_Pooling", CONTROLS),
        ("bert", "config_sentence_transformers.json", "the ", "\ud800"),
        ("whole", "tokenizer_config.json", "<|im_end|>", "\ud800"),
        ("whole", "tokenizer.json", "1.0", CONTROLS),
    ],
)
def test_what_a_file_says_is_shown_without_control_characters(models, tmp_path, model, file, old, new):
    target = shutil.copytree(Path(models["json"][0]).parent / model, tmp_path / "model")
    text = (target / file).read_text(encoding="utf-8")
    assert old in text
    (target / file).write_text(text.replace(old, json.dumps(new)[1:-1], 1))
    assert attack("encoder" if model == "bert" else "json", target) == "ValueError"


def test_a_long_message_is_cut_where_it_is_printed(capsys):
    logging.getLogger("nanopage").warning("begin" + "x" * 10**6 + "end")
    say_error("begin" + "x" * 10**6 + "end")
    for line in capsys.readouterr().err.splitlines():
        assert re.fullmatch(r"(nanopage|error): begin.*\(980,\d{3} characters\).*end", line)
        assert len(line) < 20_100
