from built.blocks import BlockManager, Sequence
from built.generate import generate
from built.scheduler import Scheduler


def test_a_long_prompt_is_computed_beside_the_tokens_of_others():
    scheduler = Scheduler(BlockManager(20, 4), max_num_seqs=9, max_num_batched_tokens=8)
    a, b = Sequence("A", list(range(3)), 9), Sequence("B", list(range(50, 65)), 9)
    scheduler.waiting += [a, b]
    steps = []
    for _ in range(4):
        batch = scheduler.schedule()
        steps.append([(seq.request_id, count) for seq, count in batch])
        for seq, count in batch:
            seq.num_computed += count
            if seq.num_computed == len(seq.token_ids):
                seq.token_ids.append(0)
    assert steps == [[("A", 3), ("B", 5)], [("A", 1), ("B", 7)], [("A", 1), ("B", 3)], [("A", 1), ("B", 1)]]


def test_a_chunk_takes_only_the_blocks_that_it_writes_to():
    scheduler = Scheduler(BlockManager(20, 4), max_num_seqs=9, max_num_batched_tokens=6)
    scheduler.waiting.append(seq := Sequence("A", list(range(15)), 9))
    scheduler.schedule()
    assert len(seq.block_table) == 2


def test_a_long_prompt_needs_blocks_for_all_its_tokens_to_start():
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=9, max_num_batched_tokens=6)
    scheduler.waiting += [Sequence("A", list(range(3)), 9), Sequence("B", list(range(50, 64)), 9)]
    assert [(seq.request_id, count) for seq, count in scheduler.schedule()] == [("A", 3)]
    assert scheduler.waiting[0].request_id == "B" and scheduler.waiting[0].block_table == []


def test_no_step_is_larger_than_the_budget_and_no_answer_changes(model, prompts, start, run, watch_sizes):
    engine = start(num_blocks=14, max_num_batched_tokens=7, max_num_seqs=5)
    sizes = watch_sizes(engine.model)
    requests = prompts([5, 23, 2, 30, 13])
    for number, prompt in enumerate(requests):
        engine.add_request(str(number), prompt, max_tokens=9)
    tokens = run(engine)
    assert max(sizes) == 7
    assert [tokens[str(number), 0] for number in range(5)] == [generate(model, prompt, 9) for prompt in requests]
