"""What sampling parameters do: temperature, truncation, penalties, allowed tokens, stop strings, log-probabilities.

python examples/sampling.py
"""

from nanopage import LLM, SamplingParams

PROMPT = "A list of colors: red,"

if __name__ == "__main__":
    llm = LLM()
    tokenizer = llm.get_tokenizer()
    digits = [tokenizer.encode(digit)[0] for digit in "0123456789"]
    settings = {
        "greedy": SamplingParams(temperature=0, max_tokens=16),
        "sampled, reproducible": SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=16),
        "no repetition": SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=16),
        "digits only": SamplingParams(temperature=0, allowed_token_ids=digits, max_tokens=6),
        "up to the first comma": SamplingParams(temperature=0, stop=[","], max_tokens=16),
        "with log-probabilities": SamplingParams(temperature=0, logprobs=2, max_tokens=2),
    }
    # All of these run in one batch: each request has parameters of its own.
    for name, output in zip(settings, llm.generate([PROMPT] * len(settings), list(settings.values())), strict=True):
        completion = output.outputs[0]
        print(f"{name}: {completion.text!r}")
        for table in completion.logprobs or []:
            print("  " + ", ".join(f"{each.decoded_token!r} {each.logprob:.2f}" for each in table.values()))
