"""Messages between an executor and its workers: to bytes and back."""

import contextlib
import math
import random

import msgspec
import numpy as np
import pytest
from helpers import examples, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.distributed.messages import (
    FromWorker,
    Result,
    Run,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from nanopage.step import (
    NO_TOKEN,
    Batch,
    BatchResult,
    BlockUpdate,
    Fork,
    NewSequence,
    PromptLogprobs,
    SamplingSettings,
)

numbers = st.integers(0, 2**31)
several = st.lists(numbers, max_size=5)
pairs = st.lists(st.tuples(numbers, numbers), max_size=4)
reals = st.floats(allow_nan=False)  # with infinities: NaN is not equal to itself
seeds = st.integers(-(2**63), 2**63 - 1)
sampling = st.builds(
    SamplingSettings,
    temperature=reals,
    top_p=reals,
    top_k=st.integers(-1, 2**63 - 1),
    min_p=reals,
    repetition_penalty=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    dry_multiplier=reals,
    dry_base=reals,
    dry_allowed_length=reals,
    dry_breaker_ids=several,
    logit_bias=st.dictionaries(numbers, reals, max_size=3),
    allowed_token_ids=st.none() | several,
    bad_words_token_ids=st.lists(several, max_size=3),
    min_tokens=numbers,
    ending_token_ids=several,
    logprobs=st.none() | numbers,
    prompt_logprobs=st.none() | numbers,
)
batches = st.builds(
    Batch,
    swap_out=pairs,
    swap_in=pairs,
    copies=pairs,
    cleared=several,
    new=st.lists(st.builds(NewSequence, numbers, several, numbers, seeds, sampling), max_size=3),
    forks=st.lists(st.builds(Fork, numbers, numbers, numbers, seeds), max_size=3),
    blocks=st.lists(st.builds(BlockUpdate, numbers, numbers, several), max_size=3),
    tokens=st.lists(st.tuples(numbers, numbers, numbers), max_size=3),
    rows=several,
    starts=several,
    counts=several,
    sampled_from=several,
    sampled_rows=several,
    masks=st.dictionaries(numbers, st.binary(max_size=3), max_size=2),
    awaits_masks=st.booleans(),
)
tables = st.dictionaries(numbers, st.tuples(reals, numbers), max_size=4)
results = st.builds(
    BatchResult,
    token_ids=st.lists(numbers | st.just(NO_TOKEN), max_size=5),
    logprobs=st.dictionaries(numbers, tables, max_size=3),
    prompt_logprobs=st.lists(st.builds(PromptLogprobs, numbers, numbers, st.lists(tables, max_size=3)), max_size=2),
    prepare_seconds=reals,
    model_seconds=reals,
    sample_seconds=reals,
    wait_seconds=reals,
)


def sent(batch: Batch) -> Batch:
    message = decode_to_worker(encode(Run(0, batch)))
    assert isinstance(message, Run)
    return message.batch


def returned(result: BatchResult) -> BatchResult:
    message = decode_from_worker(encode(Result(0, result)))
    assert isinstance(message, Result)
    return message.result


@settings(max_examples=examples(200), deadline=None)
@given(batches)
def test_a_batch_comes_back_as_it_was(batch):
    back = sent(batch)
    assert back == batch
    assert repr(back) == repr(batch), "with the same types, and dicts in the same order"


@settings(max_examples=examples(200), deadline=None)
@given(results)
def test_a_result_comes_back_as_it_was(result):
    back = returned(result)
    assert back == result
    assert repr(back) == repr(result), "a table begins with the sampled token: the order counts"


def test_empty_messages_and_defaults():
    assert sent(Batch()) == Batch()
    assert returned(BatchResult()) == BatchResult()
    assert decode_to_worker(msgspec.msgpack.encode({"type": "Run", "number": 0, "batch": {}})) == Run(0, Batch())
    assert Batch().num_tokens == 0
    assert Batch(counts=[1, 1, 7]).num_tokens == 9


def test_a_log_probability_that_is_not_a_number_comes_back_as_one():
    result = returned(BatchResult([1], {0: {1: (math.nan, 1), 2: (-math.inf, 2)}}))
    assert math.isnan(result.logprobs[0][1][0])
    assert result.logprobs[0][2] == (-math.inf, 2)


def plain(message) -> dict:
    return msgspec.msgpack.decode(encode(message), strict=False)


A_BATCH = Batch(
    new=[NewSequence(0, [1, 2], 2, 7, SamplingSettings(logit_bias={3: 1.0}))],
    forks=[Fork(0, 1, 2, 8)],
    blocks=[BlockUpdate(0, 0, [4])],
    tokens=[(0, 2, 5)],
    copies=[(1, 2)],
    rows=[0],
    starts=[0],
    counts=[2],
    sampled_from=[0],
    sampled_rows=[0],
    masks={0: b"\x01\xff"},
)


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        (["masks"], [1]),
        (["masks", 0], "text"),
        (["rows"], 3),
        (["rows"], None),
        (["rows", 0], "0"),
        (["rows", 0], 1.5),
        (["rows", 0], None),
        (["rows", 0], [0]),
        (["awaits_masks"], 1),
        (["new"], {}),
        (["new", 0], []),
        (["new", 0, "token_ids", 1], b"\0\0"),
        (["new", 0, "seed"], 2**64 - 1.0),
        (["new", 0, "sampling"], None),
        (["new", 0, "sampling", "temperature"], "hot"),
        (["new", 0, "sampling", "allowed_token_ids"], 4),
        (["new", 0, "sampling", "logit_bias"], [[3, 1.0]]),
        (["forks", 0, "parent"], {}),
        (["blocks", 0, "blocks"], "444"),
        (["tokens", 0], [0, 2]),
        (["tokens", 0], [0, 2, 5, 6]),
        (["copies", 0], 1),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_refused_with_its_place(where, wrong):
    message = plain(Run(0, A_BATCH))
    target = message["batch"]
    for step in where[:-1]:
        target = target[step]
    target[where[-1]] = wrong
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.batch\.{where[0]}"):
        decode_to_worker(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    ("kind", "name"), [("new", "row"), ("new", "sampling"), ("forks", "seed"), ("blocks", "first")], ids=str
)
def test_a_field_that_is_missing_is_refused_by_name(kind, name):
    message = plain(Run(0, A_BATCH))
    del message["batch"][kind][0][name]
    with pytest.raises(msgspec.ValidationError, match=name):
        decode_to_worker(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "message", [None, 5, "Run", [], [[]], True, b"", {1: 2}, {"batch": {}}, {"type": "Fly"}, {"type": "Run"}], ids=repr
)
def test_another_kind_of_message_is_refused(message):
    data = msgspec.msgpack.encode(message)
    for read in (decode_to_worker, decode_from_worker):
        with pytest.raises(msgspec.DecodeError):
            read(data)


def test_a_message_of_the_other_side_is_refused():
    with pytest.raises(msgspec.ValidationError, match="Result"):
        decode_to_worker(encode(Result(0, BatchResult())))
    with pytest.raises(msgspec.ValidationError, match="Run"):
        decode_from_worker(encode(Run(0, Batch())))


@pytest.mark.parametrize(
    ("read", "message"),
    [(decode_to_worker, Run(0, A_BATCH)), (decode_from_worker, Result(0, BatchResult([1, 2], {0: {1: (-0.5, 1)}})))],
)
def test_bytes_that_are_cut_off_or_followed_by_more_are_refused(read, message):
    data = encode(message)
    for end in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            read(data[:end])
    with pytest.raises(msgspec.DecodeError):
        read(data + b"\0")


def test_random_damage_is_refused_or_read_as_a_message():
    rng = random.Random(0)
    data = encode(Run(0, A_BATCH))
    refused = 0
    for _ in range(5000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert isinstance(decode_to_worker(bytes(damaged)), ToWorker)
        except msgspec.DecodeError:
            refused += 1
    assert refused > 1000


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_refused_or_read(data):
    for read, kind in ((decode_to_worker, ToWorker), (decode_from_worker, FromWorker)):
        with contextlib.suppress(msgspec.DecodeError):
            assert isinstance(read(data), kind)


@pytest.mark.parametrize("byte", [b"\x91", b"\x81\xa1a", b"\x81\xa5batch"], ids=["arrays", "maps", "batch"])
def test_deep_nesting_is_refused_without_a_crash(byte):
    for read in (decode_to_worker, decode_from_worker):
        with pytest.raises(msgspec.DecodeError):
            read(byte * 100_000)


def test_a_length_that_is_not_there_takes_no_memory():
    for head in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xa3Run\xa5batch\x81\xa4rows\xdd\xff\xff\xff\xff",
    ):
        with pytest.raises(msgspec.DecodeError):
            decode_to_worker(head)


def test_a_batch_of_256_decodes_is_small():
    rng = random.Random(0)
    rows = rng.sample(range(256), 256)
    batch = Batch(
        cleared=[rng.randrange(2**20) for _ in range(16)],
        blocks=[BlockUpdate(row, 8191, [rng.randrange(2**20)]) for row in rows[:16]],  # one in 16 begins a block
        rows=rows,
        starts=[rng.randrange(2**16, 2**17) for _ in rows],
        counts=[1] * 256,
        sampled_from=list(range(256)),
        sampled_rows=rows,
    )
    assert batch.num_tokens == 256
    assert len(encode(Run(0, batch))) < 3500


def test_any_valid_parameters_can_be_sent(tmp_path):
    config = EngineConfig(
        model=str(tiny_model(tmp_path)), device="cpu", enforce_eager=True, max_model_len=64, num_gpu_blocks_override=8
    )
    engine = build_engine(config)
    half = np.float64(0.5)  # a float, but of a class that msgspec does not know
    params = SamplingParams(
        temperature=half, top_p=half, min_p=half, repetition_penalty=half, presence_penalty=half,
        frequency_penalty=half, logit_bias={3: half, 4: 1}, top_k=2**63 - 1, min_tokens=2**63 - 1, max_tokens=None,
        seed=-(2**63), allowed_token_ids=[3, 4], bad_words=["the cat"], stop_token_ids=[5],
    )  # fmt: skip
    (seq,) = engine.input_processor.make_request("a", [1, 2, 3], params).group.seqs
    batch = Batch(new=[NewSequence(0, seq.token_ids, seq.num_prompt_tokens, seq.seed, seq.settings)])
    assert sent(batch) == batch
    assert seq.settings.top_k == engine.model_config.vocab_size, "all of them, as before"
    assert seq.settings.min_tokens >= seq.max_total_tokens - seq.num_prompt_tokens, "more than there will be"
