"""Complete several prompts at once.

python examples/offline.py
"""

from nanopage import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]

if __name__ == "__main__":
    llm = LLM()  # SmolLM2-135M-Instruct; LLM(model=...) takes a directory, a .gguf file or a hub id
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
