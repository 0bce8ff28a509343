from built.generate import KVCache, generate


def test_a_cache_changes_no_token(model, prompts):
    for prompt in prompts([1, 9, 14]):
        assert generate(model, prompt, 10, cache=KVCache(model)) == generate(model, prompt, 10)


def test_each_token_is_computed_once(model, prompts, monkeypatch):
    steps, forward = [], model.forward

    def watch(token_ids, positions, attend):
        steps.append((token_ids.tolist(), positions.tolist()))
        return forward(token_ids, positions, attend)

    monkeypatch.setattr(model, "forward", watch)
    (prompt,) = prompts([6])
    output = generate(model, prompt, 4, cache=KVCache(model))
    expected = [(prompt, [0, 1, 2, 3, 4, 5]), *(([token], [6 + i]) for i, token in enumerate(output[:-1]))]
    assert steps == expected
