"""Several completions of one prompt: samples, the best of several, and beam search.

Each request computes the prompt once. Its blocks are shared until a completion writes to one of them.

python examples/completions.py
"""

from nanopage import LLM, BeamSearchParams, SamplingParams

PROMPT = "The best thing about the sea is"

if __name__ == "__main__":
    llm = LLM()
    (samples,) = llm.generate(PROMPT, SamplingParams(n=3, seed=1, max_tokens=12))
    (best,) = llm.generate(PROMPT, SamplingParams(n=1, best_of=5, seed=1, max_tokens=12))
    (beams,) = llm.beam_search(PROMPT, BeamSearchParams(width=3, max_tokens=12))
    for name, request in (("sample", samples), ("best of 5", best), ("beam", beams)):
        for completion in request.outputs:
            print(f"{name} {completion.index}: {completion.text!r}")
