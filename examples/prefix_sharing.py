"""Questions about one text. Its blocks are computed for the first question; the others find them in the prefix cache.

python examples/prefix_sharing.py
"""

from nanopage import LLM, SamplingParams

TEXT = "Ada Lovelace was born in London in 1815. She wrote the first published algorithm for a machine. " * 8
QUESTIONS = ["Where was she born?", "When was she born?", "What did she write?"]

if __name__ == "__main__":
    llm = LLM()
    llm.generate("A first request takes longer.", SamplingParams(max_tokens=2), use_tqdm=False)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": f"{TEXT}\n\n{question}"}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        assert output.metrics is not None and output.metrics.first_token_time is not None
        seconds = output.metrics.first_token_time - output.metrics.arrival_time
        cached, total = output.num_cached_tokens, len(output.prompt_token_ids)
        print(f"{question} {cached} of {total} prompt tokens were cached, first token after {1000 * seconds:.0f} ms")
        print(f"  {output.outputs[0].text}")
