"""Print a reply while it is generated, and stop after the first sentence.

python examples/streaming.py
"""

from nanopage import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM()
    messages = [{"role": "user", "content": "Tell me about the moon."}]
    text = ""
    for output in llm.stream(messages, SamplingParams(temperature=0, max_tokens=100)):
        text += output.outputs[0].delta
        print(output.outputs[0].delta, end="", flush=True)
        if "." in text:
            break  # leaving the loop aborts the request and frees its blocks
    print()
