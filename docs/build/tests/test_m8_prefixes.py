from built.blocks import BlockManager, Sequence
from built.generate import generate


def begin(blocks, name, tokens):
    """A sequence that takes what the cache has of it, and computes the rest in one step."""
    seq = Sequence(name, list(tokens), 9)
    prefix = blocks.find_prefix(seq)
    blocks.share(seq, prefix, len(prefix) * blocks.block_size)
    assert blocks.grow(seq, len(tokens))
    seq.num_computed = len(tokens)
    blocks.store_prefix(seq)
    return seq, prefix


def test_a_block_is_found_by_all_tokens_up_to_its_end():
    blocks = BlockManager(20, block_size=2)
    a, _ = begin(blocks, "A", [1, 2, 3, 4, 5, 6, 7])
    assert begin(blocks, "B", [1, 2, 3, 4, 9, 9, 9])[1] == a.block_table[:2]
    assert begin(blocks, "C", [9, 9, 3, 4, 5, 6, 7])[1] == [], "the same tokens behind others have another K and V"
    assert begin(blocks, "D", [1, 2, 3])[1] == a.block_table[:1]
    assert blocks.ref_counts[a.block_table[0]] == 3 and blocks.ref_counts[a.block_table[1]] == 2


def test_the_last_token_is_computed_in_any_case():
    blocks = BlockManager(20, block_size=2)
    a, _ = begin(blocks, "A", [1, 2, 3, 4])
    b, prefix = begin(blocks, "B", [1, 2, 3, 4])
    assert prefix == a.block_table[:1] and b.block_table[1] != a.block_table[1]


def test_only_blocks_whose_tokens_are_computed_are_found():
    blocks, seq = BlockManager(20, block_size=2), Sequence("A", [1, 2, 3, 4, 5], 9)
    assert blocks.grow(seq, 5)
    seq.num_computed = 3
    blocks.store_prefix(seq)
    assert blocks.find_prefix(Sequence("B", [1, 2, 3, 4, 5], 9)) == seq.block_table[:1]


def test_blocks_stay_until_their_memory_is_needed_and_the_end_goes_first():
    blocks = BlockManager(5, block_size=2)
    a, _ = begin(blocks, "A", [1, 2, 3, 4, 5, 6])
    first, second, _ = a.block_table
    blocks.free(a)
    assert blocks.num_free == 5 and blocks.ref_counts == {}
    b, _ = begin(blocks, "B", [50, 51, 52, 53, 54])  # two blocks are free, and one is evicted
    assert blocks.find_prefix(Sequence("C", [1, 2, 3, 4, 5, 6, 7], 9)) == [first, second]
    blocks.free(b)
    c, prefix = begin(blocks, "C", [1, 2, 3])
    assert prefix == [first] and first not in blocks.free_blocks
    d = Sequence("D", [60] * 8, 9)
    assert blocks.grow(d, 6) and first not in d.block_table, "a block in use is not evicted"
    blocks.free(c)
    blocks.free(d)
    assert blocks.find_prefix(Sequence("E", [50, 51, 52, 53, 54], 9)) == [], "what was evicted is not found"


def test_requests_compute_a_prefix_once_and_no_answer_changes(model, prompts, start, run, watch_sizes):
    engine = start(num_blocks=40, max_num_batched_tokens=16)
    sizes = watch_sizes(engine.model)
    system, *questions = prompts([30, 3, 5, 4])
    tokens = {}
    for number, question in enumerate(questions):
        engine.add_request(str(number), system + question, max_tokens=5)
        run(engine, tokens)
    alone = [generate(model, system + question, 5) for question in questions]
    assert [tokens[str(number), 0] for number in range(3)] == alone
    assert sum(sizes) == (33 + 4) + (35 - 28 + 4) + (34 - 28 + 4), "7 blocks of 4 tokens are found"


def test_a_small_pool_with_evictions_and_preemptions_changes_no_answer(model, prompts, start, run):
    engine = start(num_blocks=9, max_num_batched_tokens=9)
    system, *questions = prompts([12, 3, 5, 4, 1, 7, 2])
    requests = [(system + question) if number % 3 else question + system for number, question in enumerate(questions)]
    for number, prompt in enumerate(requests):
        engine.add_request(str(number), prompt, max_tokens=8)
    tokens = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert [tokens[str(number), 0] for number in range(6)] == [generate(model, prompt, 8) for prompt in requests]
