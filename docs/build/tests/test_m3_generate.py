from built.generate import generate


def test_each_token_is_the_most_likely_one(model, prompts):
    from helpers import reference_logits, tiny_hf_model

    (prompt,) = prompts([6])
    output = generate(model, prompt, max_tokens=8)
    (logits,) = reference_logits(tiny_hf_model(dtype="float64"), [prompt + output])
    assert output == logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()
    assert len(output) == 8 and len(prompt) == 6, "the prompt stays as it is"


def test_a_stop_token_ends_the_answer_and_is_its_last(model, prompts):
    (prompt,) = prompts([6])
    output = generate(model, prompt, max_tokens=8)
    stop = output[3]
    assert generate(model, prompt, 8, stop_ids=(stop, 10_000)) == output[: output.index(stop) + 1]
