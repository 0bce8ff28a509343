"""AsyncLLM: requests of coroutines on one engine; what cancels, fails or falls behind disturbs nobody else."""

import asyncio
import contextlib
import dataclasses
import gc
import random
import threading
import time
import weakref

import pytest

from nanopage import LLM, AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams
from nanopage.aio.async_llm import EngineDeadError
from nanopage.aio.engine_thread import Inbox

OPTIONS = {"dtype": "float64", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64, "block_size": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=100)


@contextlib.contextmanager
def running(model, **options):
    """An AsyncLLM. At its end nothing may be left of any request."""
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **{**OPTIONS, **options}))
    try:
        yield llm
        asyncio.run(at_rest(llm))
        manager = llm.engine.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        assert not llm.engine_thread.inboxes
    finally:
        llm.shutdown()
        assert not llm.engine_thread.thread.is_alive()


async def at_rest(llm) -> None:
    """Wait until the engine has nothing to do."""
    while llm.engine_thread.mail or not llm.engine_thread.idle:
        await asyncio.sleep(0.001)


@pytest.fixture
def llm(model):
    with running(model) as llm:
        yield llm


async def final(llm, prompt, params, request_id, **options):
    async for output in llm.generate(prompt, params, request_id, **options):
        last = output
    assert last.finished
    return last


def hold_steps(llm) -> tuple[threading.Event, threading.Event]:
    """Let each step wait. Returns two events: a step has begun; steps may go on."""
    in_step, may_go_on, step = threading.Event(), threading.Event(), llm.engine.step

    def waiting():
        in_step.set()
        may_go_on.wait(60)
        return step()

    llm.engine.step = waiting
    return in_step, may_go_on


def test_many_requests_at_once_get_the_answers_of_the_offline_engine(model, llm):
    prompts = [f"the {i} cats" for i in range(20)]
    params = [SamplingParams(seed=i, n=1 + i % 3, max_tokens=5 + i, ignore_eos=True) for i in range(20)]
    expected = LLM(str(model), **OPTIONS).generate(prompts, params, use_tqdm=False)

    async def one(i):
        texts = [""] * params[i].n
        async for output in llm.generate(prompts[i], params[i], str(i)):
            for completion in output.outputs:
                texts[completion.index] += completion.delta
                assert completion.text == texts[completion.index]
            last = output
        return texts, [completion.token_ids for completion in last.outputs]

    async def all_of_them():
        return await asyncio.gather(*map(one, range(20)))

    for (texts, token_ids), output in zip(asyncio.run(all_of_them()), expected, strict=True):
        assert texts == [completion.text for completion in output.outputs]
        assert token_ids == [completion.token_ids for completion in output.outputs]


def test_prompts_of_every_form_and_a_beam_search(model, llm):
    offline = LLM(str(model), **OPTIONS)
    ids = llm.engine.tokenizer.encode("the cat")
    prompts = ["the cat", ids, {"prompt": "the cat", "cache_salt": "a"}]
    texts = [asyncio.run(final(llm, prompt, GREEDY, "a")).outputs[0].text for prompt in prompts]
    assert texts == 3 * [offline.generate("the cat", GREEDY, use_tqdm=False)[0].outputs[0].text]
    search = BeamSearchParams(width=3, max_tokens=5)
    beams = offline.beam_search("the cat", search, use_tqdm=False)[0].outputs
    assert asyncio.run(final(llm, "the cat", search, "b")).outputs == beams
    assert len(asyncio.run(final(llm, "the cat", None, "c")).outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("prompt", "params", "request_id", "error", "names"),
    [
        ("", GREEDY, "a", ValueError, "prompt"),
        ("the cat " * 200, GREEDY, "a", ValueError, "max_model_len"),
        ([10**6], GREEDY, "a", ValueError, "1000000"),
        ("the cat", 3, "a", TypeError, "sampling_params"),
        ("the cat", GREEDY, 5, TypeError, "request_id"),
        ("the cat", GREEDY, ["a"], TypeError, "request_id"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing(llm, prompt, params, request_id, error, names):
    with pytest.raises(error, match=names):
        asyncio.run(final(llm, prompt, params, request_id))
    assert asyncio.run(final(llm, "the cat", GREEDY, "a")).finished


def test_an_id_in_use_is_refused_and_the_other_request_goes_on(llm):
    async def clash():
        stream = await llm.add_request("a", "the cat", LONG)
        with pytest.raises(ValueError, match="'a' is in use"):
            await llm.add_request("a", "the dog", GREEDY)
        outputs = [output async for output in stream]
        assert len(outputs[-1].outputs[0].token_ids) == 100
        assert (await final(llm, "the dog", GREEDY, "a")).finished  # the id is free again

    asyncio.run(clash())


@pytest.mark.parametrize("state", ["its prompt is read", "queued", "prefilling", "decoding"])
def test_cancelling_aborts_in_every_state(model, state):
    """A victim is cancelled in the given state. Requests beside it get the answers that they get alone."""
    with running(model, max_num_batched_tokens=8, max_num_seqs=2) as llm:
        alone = [asyncio.run(final(llm, text, LONG, "a")).outputs[0].text for text in ("one", "two")]
        scheduler, make_request = llm.engine.scheduler, llm.engine.input_processor.make_request
        reading, may_go_on = threading.Event(), threading.Event()

        def slow(request_id, *args):
            if request_id == "victim" and state == "its prompt is read":
                reading.set()
                may_go_on.wait(60)
            return make_request(request_id, *args)

        def group_of_victim():
            groups = scheduler.waiting + scheduler.running
            return next((group for group in groups if group.request_id == "victim"), None)

        def reached():
            group = group_of_victim()
            if state == "its prompt is read":
                return reading.is_set()
            if state == "queued":
                return group in scheduler.waiting
            num_computed = group.seqs[0].num_computed_tokens if group is not None else 0
            if state == "prefilling":
                return 0 < num_computed < group.seqs[0].num_prompt_tokens
            return group is not None and group.seqs[0].num_output_tokens > 2

        async def crowd():
            llm.engine.input_processor.make_request = slow
            texts = ("one", "two") if state == "queued" else ("one",)
            others = [asyncio.create_task(final(llm, text, LONG, text)) for text in texts]
            while len(scheduler.running) < len(others):
                await asyncio.sleep(0)
            victim = asyncio.create_task(final(llm, "the cat " * 40, GREEDY, "victim"))
            while not reached():
                assert not victim.done()
                await asyncio.sleep(0)
            victim.cancel()
            with pytest.raises(asyncio.CancelledError):
                await victim
            may_go_on.set()
            while group_of_victim() is not None:
                await asyncio.sleep(0)
            if state != "its prompt is read":  # then it is never in the engine
                assert at["abort"] - at["cancel"] <= 2
            outputs = await asyncio.gather(*others)
            assert [output.outputs[0].text for output in outputs] == alone[: len(others)]
            assert (await final(llm, "one", LONG, "victim")).outputs[0].text == alone[0]  # the id is free again

        at, steps, post, abort = {}, [], llm.engine_thread.post, llm.engine.abort  # at: the number of steps by then

        def watched_post(message):
            if isinstance(message, Inbox):
                at["cancel"] = len(steps)
            post(message)

        def watched_abort(request_id):
            at["abort"] = len(steps)
            return abort(request_id)

        llm.engine_thread.post, llm.engine.abort = watched_post, watched_abort
        llm.engine.listeners.append(steps.append)
        asyncio.run(crowd())


def test_leaving_the_loop_aborts(llm):
    async def leave():
        outputs = llm.generate("the cat", LONG, "a")
        async for output in outputs:
            assert not output.finished
            break
        await outputs.aclose()
        await at_rest(llm)
        assert llm.metrics.ended["abort"] == 1 and llm.metrics.ended["length"] == 0

    asyncio.run(leave())


def test_abort_gives_the_reader_what_there_is(llm):
    async def aborted():
        stream = await llm.add_request("a", "the cat", LONG)
        first = await anext(stream)
        await llm.abort("a")
        outputs = [first, *[output async for output in stream]]
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert 1 <= len(outputs[-1].outputs[0].token_ids) < 100
        assert "".join(output.outputs[0].delta for output in outputs) == outputs[-1].outputs[0].text
        await llm.abort("a")  # of no request
        return outputs

    assert asyncio.run(aborted())[-1].finished


def test_an_abort_while_the_prompt_is_read(llm):
    reading, may_go_on = threading.Event(), threading.Event()
    make_request = llm.engine.input_processor.make_request

    def slow(*args):
        reading.set()
        may_go_on.wait(60)
        return make_request(*args)

    async def aborted():
        llm.engine.input_processor.make_request = slow
        task = asyncio.create_task(final(llm, "the cat", LONG, "a"))
        while not reading.is_set():
            await asyncio.sleep(0)
        await llm.abort("a")
        may_go_on.set()
        return await task

    assert asyncio.run(aborted()).outputs[0].finish_reason == "abort"


def test_closing_a_stream_late_does_not_abort_the_next_request_with_its_id(llm):
    async def reuse():
        first = await llm.add_request("a", "the cat", GREEDY)
        await at_rest(llm)  # it has ended, and nobody has read it
        second = await llm.add_request("a", "the cat", LONG)
        await first.aclose()
        outputs = [output async for output in second]
        assert outputs[-1].outputs[0].finish_reason == "length"

    asyncio.run(reuse())


def test_a_shutdown_that_waits_for_a_hung_step_ends(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))
    in_step, may_go_on = hold_steps(llm)

    async def crowd():
        stream = await llm.add_request("a", "the cat", LONG)
        await asyncio.to_thread(in_step.wait)
        assert not await asyncio.to_thread(llm.shutdown, 0.05)
        may_go_on.set()
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass

    asyncio.run(crowd())
    assert llm.shutdown()


def test_a_reader_that_falls_behind_gets_only_the_latest_output_and_loses_nothing(llm):
    async def slow():
        stream = await llm.add_request("a", "the cat", LONG)
        first = await anext(stream)
        await at_rest(llm)  # it reads nothing in the meantime
        rest = [output async for output in stream]
        assert len(rest) == 1 and rest[0].finished
        assert first.outputs[0].delta + rest[0].outputs[0].delta == rest[0].outputs[0].text
        return rest[0].outputs[0].text

    assert asyncio.run(slow()) == asyncio.run(final(llm, "the cat", LONG, "b")).outputs[0].text


def test_several_event_loops_share_an_engine(llm):
    expected = [asyncio.run(final(llm, f"cat {i}", GREEDY, str(i))).outputs[0].text for i in range(4)]
    texts = {}

    def loop(i):
        texts[i] = asyncio.run(final(llm, f"cat {i}", GREEDY, str(i))).outputs[0].text

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(4)] == expected


def test_requests_of_a_loop_that_was_closed_are_aborted(llm):
    async def begin():
        await anext(await llm.add_request("a", "the cat", LONG))

    asyncio.run(begin())
    asyncio.run(at_rest(llm))
    assert "a" not in llm.engine_thread.inboxes


def test_a_request_that_makes_every_step_fail_ends_with_an_error_and_the_others_go_on(llm):
    expected = asyncio.run(final(llm, "the cat", GREEDY, "a")).outputs[0].text
    launch, bad = llm.engine.executor.worker.launch, llm.engine.tokenizer.encode("bad")

    def failing(batch):
        rows = {new.row for new in batch.new if new.token_ids[: len(bad)] == bad}
        failing.rows = (failing.rows | rows) - {new.row for new in batch.new if new.row not in rows}
        if failing.rows & set(batch.rows):
            raise ValueError("a bad row")
        return launch(batch)

    failing.rows = set()

    async def crowd():
        llm.engine.executor.worker.launch = failing
        return await asyncio.gather(final(llm, "the cat", GREEDY, "good"), final(llm, "bad", GREEDY, "bad"))

    good, bad_output = asyncio.run(crowd())
    assert good.outputs[0].text == expected and good.error is None
    assert bad_output.outputs[0].finish_reason == "error" and "a bad row" in bad_output.error


@pytest.mark.parametrize("place", ["submit", "half a submit", "count", "count its end", "count its step", "abort"])
def test_what_fails_for_a_request_outside_a_step_fails_that_request_alone(llm, monkeypatch, place):
    """The engine's thread queues, counts and aborts requests between steps."""
    expected = asyncio.run(final(llm, "the cat", GREEDY, "a")).outputs[0].text

    def fail_for_bad(owner, name):
        plain = getattr(owner, name)

        def failing(what, *args):
            if place.endswith("step") or getattr(getattr(what, "group", what), "request_id", what) == "bad":
                raise OverflowError("int too large to convert to float")
            return plain(what, *args)

        monkeypatch.setattr(owner, name, failing)

    engine, metrics = llm.engine, llm.metrics
    owner, name = {
        "submit": (engine, "submit"),
        "half a submit": (engine.scheduler, "add"),
        "count": (metrics, "_add_request"),
        "count its end": (metrics, "_add_finished"),
        "count its step": (metrics, "_add_step"),
        "abort": (engine.scheduler.queues, "finish"),
    }[place]
    fail_for_bad(owner, name)

    async def crowd():
        if place == "abort":
            stream = await llm.add_request("bad", "bad", LONG)
            await anext(stream)
            await stream.aclose()
            return await final(llm, "the cat", GREEDY, "good"), None
        return await asyncio.gather(final(llm, "the cat", GREEDY, "good"), final(llm, "bad", GREEDY, "bad"))

    good, bad = asyncio.run(crowd())
    assert good.outputs[0].text == expected and good.error is None
    if "submit" in place:
        assert "could not be queued: OverflowError" in bad.error
    assert asyncio.run(final(llm, "the cat", GREEDY, "next")).outputs[0].text == expected


def test_when_the_engine_dies_every_reader_is_told_and_new_requests_are_refused(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))

    def broken():
        raise OSError("the device is gone")

    async def crowd():
        streams = [await llm.add_request(str(i), "the cat", LONG) for i in range(3)]
        await anext(streams[0])
        llm.engine.step = broken
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the device is gone"):
                async for _ in stream:
                    pass
        for refused in (llm.add_request("a", "the cat", GREEDY), llm.check_health(), llm.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await refused
        await llm.abort("a")

    assert llm.is_running and not llm.errored and llm.dead_error is None
    asyncio.run(crowd())
    assert llm.errored and not llm.is_running and not llm.engine_thread.inboxes
    llm.shutdown()
    assert not llm.engine_thread.thread.is_alive()


def test_a_step_that_raises_once_loses_nothing(llm):
    expected = asyncio.run(final(llm, "the cat", GREEDY, "a")).outputs[0].text

    def listener(stats):
        llm.engine.listeners.remove(listener)
        raise ValueError("a listener")

    llm.engine.listeners.append(listener)
    assert asyncio.run(final(llm, "the cat", GREEDY, "b")).outputs[0].text == expected


def test_shutdown_tells_the_readers(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))

    async def crowd():
        stream = await llm.add_request("a", "the cat", LONG)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass

    asyncio.run(crowd())
    llm.shutdown()  # again


def test_an_idle_engine_takes_no_steps_and_no_cpu_time(llm):
    asyncio.run(final(llm, "the cat", GREEDY, "a"))
    asyncio.run(at_rest(llm))
    steps, used, deadline = [], [usage(llm)], time.monotonic() + 60
    llm.engine.listeners.append(steps.append)
    while len(used) < 2 or used[-1] != used[-2]:  # on a busy machine, its thread may not wait yet
        assert time.monotonic() < deadline
        time.sleep(0.3)
        used.append(usage(llm))
    assert not steps
    assert llm.engine_thread.seconds_without_progress == 0


@pytest.mark.parametrize("used", ["not", "once", "while it is paused", "by a reader"])
def test_dropped_without_a_shutdown_it_ends(model, llm, used):
    """Another engine, beside it, goes on."""
    dropped = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))
    thread, engine = dropped.engine_thread.thread, weakref.ref(dropped.engine)

    async def use():
        nonlocal dropped
        stream = await dropped.add_request("a", "the cat", GREEDY)
        if used == "by a reader":
            _, may_go_on = hold_steps(dropped)
            dropped = None
            gc.collect()
            may_go_on.set()
        return [output async for output in stream][-1]

    if used in ("once", "by a reader"):
        output = asyncio.run(use())
        assert output.outputs[0].text == asyncio.run(final(llm, "the cat", GREEDY, "a")).outputs[0].text
    if used == "while it is paused":
        dropped.engine_thread.pause(lambda: None)
        asyncio.run(dropped.add_request("a", "the cat", GREEDY))
    dropped = None
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()  # again: the thread may have held it during a step
        thread.join(0.1)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None
    assert asyncio.run(final(llm, "the cat", GREEDY, "b")).finished


def usage(llm) -> tuple[str, str]:
    """How often the engine's thread has waited, and its CPU time, as Linux counts them."""
    with open(f"/proc/self/task/{llm.engine_thread.thread.native_id}/status") as file:
        switches = next(line for line in file if line.startswith("voluntary"))
    with open(f"/proc/self/task/{llm.engine_thread.thread.native_id}/stat") as file:
        return switches, file.read().split()[13]


def test_a_step_that_hangs_is_seen(llm):
    _, may_go_on = hold_steps(llm)

    async def hang():
        task = asyncio.create_task(final(llm, "the cat", GREEDY, "a"))
        while llm.engine_thread.seconds_without_progress < 0.05:
            await asyncio.sleep(0.01)
        may_go_on.set()
        await task

    asyncio.run(hang())


def test_a_step_that_hangs_is_seen_after_a_pause_that_ended_at_once(llm):
    in_step, may_go_on = hold_steps(llm)

    async def hang():
        task = asyncio.create_task(final(llm, "the cat", GREEDY, "a"))
        await asyncio.to_thread(in_step.wait, 20)
        thread = llm.engine_thread
        thread.pause(lambda: (in_step.clear(), may_go_on.clear(), thread.resume()))  # before the thread can wait
        may_go_on.set()
        while may_go_on.is_set():
            await asyncio.sleep(0.001)
        assert await asyncio.to_thread(in_step.wait, 20)
        try:
            assert not llm.engine_thread.idle
        finally:
            may_go_on.set()
        await task

    asyncio.run(hang())


def test_forgetting_the_prefixes_while_requests_run(llm):
    async def crowd():
        task = asyncio.create_task(final(llm, "the cat " * 5, GREEDY, "a"))
        assert await llm.reset_prefix_cache()
        await task
        assert (await final(llm, "the cat " * 5, GREEDY, "b")).num_cached_tokens > 0
        await llm.reset_prefix_cache()
        assert (await final(llm, "the cat " * 5, GREEDY, "c")).num_cached_tokens == 0

    asyncio.run(crowd())


@pytest.mark.parametrize("cancelled", [False, True])
def test_forgetting_the_prefixes_does_not_wait_for_an_engine_that_ends(model, cancelled):
    """The reset is posted during a step, and the engine is shut down before the next."""
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))
    in_step, may_go_on = hold_steps(llm)

    async def end():
        await llm.add_request("a", "the cat", LONG)
        await asyncio.to_thread(in_step.wait)
        reset = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0)
        if cancelled:
            reset.cancel()
        llm.shutdown(timeout=0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError if cancelled else EngineDeadError):
            await asyncio.wait_for(reset, 30)

    asyncio.run(end())
    assert llm.shutdown()
    assert "shut down" in str(llm.dead_error)


def test_steps_are_kept_short(llm):
    budget = llm.engine.scheduler.token_budget
    assert budget.seconds is not None and budget.observe in llm.engine.listeners


def test_metrics_count_what_ran(llm):
    for i in range(3):
        asyncio.run(final(llm, "the cat", GREEDY, str(i)))
    asyncio.run(at_rest(llm))
    metrics = {metric.name: metric for metric in llm.get_metrics() if metric.name != "vllm:request_success"}
    assert metrics["vllm:generation_tokens"].value == 30
    assert metrics["vllm:num_requests_running"].value == metrics["vllm:num_requests_waiting"].value == 0
    assert metrics["vllm:e2e_request_latency_seconds"].count == 3


@pytest.mark.parametrize("seed", range(3))
def test_a_random_crowd_with_cancellations_mixes_nothing_up(model, seed):
    rng = random.Random(seed)
    prompts = [
        " ".join(rng.choices(["the", "cat", "dog", "in", "a", "house"], k=rng.randint(1, 30))) for _ in range(40)
    ]
    params = [SamplingParams(seed=i, max_tokens=rng.randint(1, 40), ignore_eos=True) for i in range(40)]
    offline = LLM(str(model), **OPTIONS).generate(prompts, params, use_tqdm=False)
    cut = {i: rng.random() * 0.5 for i in range(40) if rng.random() < 0.5}

    async def one(i):
        await asyncio.sleep(rng.random() * 0.3)
        try:
            async with asyncio.timeout(cut.get(i)):
                return (await final(llm, prompts[i], params[i], str(i))).outputs[0].text
        except TimeoutError:
            return None

    async def all_of_them():
        return await asyncio.gather(*map(one, range(40)))

    with running(model, max_num_batched_tokens=32, num_gpu_blocks_override=40) as llm:
        texts = asyncio.run(all_of_them())
    for i, (text, output) in enumerate(zip(texts, offline, strict=True)):
        assert text == output.outputs[0].text or (text is None and i in cut)
