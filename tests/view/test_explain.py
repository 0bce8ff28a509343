"""explain: each decision has a sentence, and the sentences are true. The fuzz suite checks that there is one
for each in random worlds (`check_sentences`)."""

import pytest
from fake_executor import add, fake_engine, tokens

from nanopage import BeamSearchParams, LLMEngine
from nanopage.outputs import StepStats
from nanopage.speculation.drafts import Drafts
from nanopage.view.explain import explain
from nanopage.view.invariants import check_blocks

PREFIX = list(range(10, 26))  # two blocks


def run(engine: LLMEngine, most: int = 200) -> list[list[str]]:
    """The sentences of each step until all requests have ended."""
    told = []
    while engine.has_unfinished_requests():
        engine.step()
        told.append(explain(engine))
        assert len(told) < most
    return told


def matching(told: list[list[str]], text: str) -> list[str]:
    return [sentence for step in told for sentence in step if text in sentence]


def test_a_request_from_its_arrival_to_its_end():
    engine = fake_engine()
    add(engine, "a", [*PREFIX, 1, 2], tokens(3))
    assert run(engine) == [
        [
            "Request a arrives: 18 prompt tokens.",
            "Request a is admitted: it needs 3 blocks, and 14 are free.",
            "The step runs 18 prompt tokens of 1 sequence: 18 of at most 2048 tokens.",
        ],
        ["The step runs 1 decode: 1 of at most 2048 tokens."],
        [
            "The step runs 1 decode: 1 of at most 2048 tokens.",
            "Request a ends: it has as many tokens as it may have.",
        ],
    ]
    add(engine, "b", [*PREFIX, 3], tokens(1))
    (sentences,) = run(engine)
    assert "Request b is admitted: it needs 1 block, and 14 are free; 16 of its 17 tokens are in the prefix cache." in (
        sentences
    )


def test_the_example_of_a_preemption():
    engine = fake_engine(6, preemption_mode="recompute", enable_prefix_caching=False)
    for name in "abc":
        add(engine, name, [ord(name)] * 15, tokens(20))
    told = run(engine)
    first = matching(told, "is preempted")[0]
    assert first == (
        "Request c is preempted: 1 block needed, 0 free, for request a; it is the latest of the lowest priority. "
        "Its tokens will be computed again."
    )
    (step,) = [step for step in told if first in step]
    assert "Request c waits: blocks ran out in this step, so none is admitted." in step
    after = told[told.index(step) + 1]
    assert after[0] == "Request c waits: 3 blocks needed, 0 free."


def test_swapping_names_host_memory_and_says_when_it_is_full():
    engine = fake_engine(6, 8, preemption_mode="swap", enable_prefix_caching=False)
    for name in "abc":
        add(engine, name, [ord(name)] * 15, tokens(20))
    told = run(engine)
    assert matching(told, "Its blocks are copied to host memory.")
    assert matching(told, "is swapped in: its 2 blocks are copied back from host memory")
    engine = fake_engine(6, 1, preemption_mode="swap", enable_prefix_caching=False)
    for name in "abc":
        add(engine, name, [ord(name)] * 15, tokens(20))
    assert matching(run(engine), "will be computed again, because host memory is full.")


def test_a_higher_priority():
    engine = fake_engine(8, scheduling_policy="priority", enable_prefix_caching=False)
    add(engine, "low", [1] * 30, tokens(20), 1)
    engine.step()
    add(engine, "high", [2] * 40, tokens(4), 0)
    engine.step()
    (text,) = [text for text in explain(engine) if "preempted" in text]
    assert text.startswith("Request low is preempted: request high has a higher priority (5 blocks needed, 4 free)")


def test_a_higher_priority_where_no_more_sequences_may_run():
    engine = fake_engine(40, scheduling_policy="priority", max_num_seqs=1)
    add(engine, "low", [1] * 9, priority=1)
    engine.step()
    add(engine, "high", [2] * 9, priority=0)
    engine.step()
    (text,) = [text for text in explain(engine) if "preempted" in text]
    assert "request high has a higher priority, and no more sequences may run at once" in text


def waits(engine: LLMEngine) -> list[str]:
    engine.step()
    return [text for text in explain(engine) if "waits" in text or "wait " in text]


def test_why_requests_wait():
    engine = fake_engine(40, max_num_seqs=2, max_num_batched_tokens=32)
    for name, prompt in (("a", [1] * 40), ("b", [2] * 9), ("c", [3]), ("d", [4])):
        add(engine, name, prompt)
    assert waits(engine) == [
        "Request b waits: the step's budget of tokens is used up. Requests c and d wait behind it."
    ]
    assert waits(engine) == [
        "Request c waits: 1 sequence would run beside 2, and 2 may run at once. Request d waits behind it."
    ]
    engine = fake_engine(40)
    for name in "abc":
        add(engine, name, [*PREFIX, ord(name)])
    assert waits(engine) == [
        "Request b waits: request a computes a block in this step that it can share in the next. Request c waits "
        "behind it."
    ]
    engine = fake_engine(10, enable_prefix_caching=False)
    for name in "abc":
        add(engine, name, [ord(name)] * 35)
    assert waits(engine) == ["Request c waits: 5 blocks needed, 0 free."]


def test_a_step_that_fails_runs_requests_alone():
    engine = fake_engine()
    for name in "ab":
        add(engine, name, [ord(name)] * 9)
    engine.step()
    engine.executor.error = RuntimeError("a fault")
    engine.step()
    texts = explain(engine)
    assert (
        "Request a is preempted: an exception has ended a step, and all requests start again. Its tokens will be "
        in (" ".join(texts))
    )
    engine.step()
    assert "Request b waits: a step has failed, and request a runs alone." in explain(engine)


def test_evictions_copies_forks_and_drops():
    engine = fake_engine(10)
    add(engine, "a", [1] * 70, tokens(2))
    run(engine)
    add(engine, "n", [*PREFIX, 1], tokens(4, n=3, temperature=1))
    told = run(engine)
    assert matching(told, "evicted from the prefix cache for request n: no other block is free")
    assert matching(told, "Request n forks: 2 more share the 3 blocks of its 17 tokens.")
    assert len(matching(told, "request n writes to it while others share it.")) == 2
    engine = fake_engine(20)
    add(engine, "beams", PREFIX, BeamSearchParams(beam_width=3, max_tokens=4))
    told = run(engine)
    assert matching(told, "of request beams forks from beam")
    assert matching(told, "is dropped: no continuation of it is among the best.")
    assert len(matching(told, "is dropped: the search has ended.")) == 3


class Guesses:
    """A drafter that is always wrong about the last of three tokens, and right about the others by accident or not."""

    def propose(self, decodes, most, schedule) -> dict:
        return {seq: [299, 299, 299] for seq in decodes}

    def learn(self, seq, num_drafted, num_accepted): ...

    def observe(self, stats: StepStats): ...

    def rest(self): ...

    def restart(self): ...


def test_refused_drafts_and_late_tokens_are_dropped():
    engine = fake_engine()
    engine.scheduler.drafts = Drafts(Guesses())
    add(engine, "a", [1] * 9, tokens(8))
    assert matching(run(engine), "3 of the 3 drafted tokens of request a are dropped: the model has chosen otherwise.")
    engine = fake_engine(async_scheduling=True)
    params = tokens(30, stop_token_ids=list(range(5, 210)))  # the first token ends it
    add(engine, "a", [1] * 9, params)
    add(engine, "b", [2] * 9, tokens(8))
    assert matching(run(engine), "A token of request a is dropped: it had ended before the token came.")


def test_pipeline_stages_say_what_a_running_request_waits_for():
    engine = fake_engine(pipeline_parallel_size=2)
    for name in "ab":
        add(engine, name, [ord(name)] * 9)
    told = run(engine)
    assert matching(told, "waits with blocks: the next step depends on a token in flight, in another stage")
    assert matching(told, "this batch has its share of the running requests")


# What is about to happen


def test_a_plan_is_what_the_next_step_does():
    engine = fake_engine(6, preemption_mode="recompute")
    for name in "abc":
        add(engine, name, [ord(name)] * 15, tokens(20))
    while engine.has_unfinished_requests():
        engine.plan()
        engine.plan()  # changes nothing
        planned = explain(engine)
        engine.step()
        assert explain(engine)[: len(planned)] == planned


def test_a_planned_step_is_one_that_requests_can_leave_and_join():
    engine = fake_engine()
    for name in "ab":
        add(engine, name, [ord(name)] * 9, tokens(6))
    engine.step()
    assert engine.plan()
    add(engine, "c", [3] * 9, tokens(2))
    engine.abort("a")
    tokens_of = {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
    assert tokens_of == {"b": 2}
    check_blocks(engine.scheduler.block_manager)
    assert "A token of request a is dropped: it had ended before the token came." in explain(engine)
    run(engine)
    assert engine.scheduler.block_manager.num_free_blocks == 14


@pytest.mark.parametrize("index", [0, 1])
def test_one_completion_can_leave_a_planned_step(index):
    engine = fake_engine()
    add(engine, "n", PREFIX, tokens(4, n=2, temperature=1))
    engine.plan()
    engine.abort("n", index)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        check_blocks(engine.scheduler.block_manager)
    reasons = [completion.finish_reason for completion in outputs[-1].outputs]
    assert reasons == (["abort", "length"] if index == 0 else ["length", "abort"])
    assert len(outputs[-1].outputs[1 - index].token_ids) == 4


def test_nothing_to_do_is_said_too():
    engine = fake_engine()
    assert explain(engine) == [] and not engine.plan()
    engine.step()
    assert explain(engine) == []
