"""The clients of test_soak.py, in a process of their own: streaming requests, half of them cut at random moments.

Reads one JSON object from stdin: port, seconds, at_least (how many must be complete and cut, if it takes a minute
longer), concurrency, seed, longest_cut, and `work`, a list of {"body", "text"} with the text that each request must
stream. Writes one JSON object: how many were complete and cut, what was wrong, and the median time to the first text.
"""

import asyncio
import json
import random
import sys
import time


async def stream(port: int, body: dict, cut_after: float | None) -> tuple[str | None, float]:
    """(the text, or None if it was cut; seconds to the first text). Raises: ValueError for a wrong reply."""
    started, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(cut_after):
            data = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(f"{status!r} {await reader.read(500)!r}")
            text, done = "", False
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                first = first or time.perf_counter() - started
                text += event["choices"][0]["text"]
            if not done:
                raise ValueError("the stream ended without [DONE]")
            return text, first
    except TimeoutError:
        return None, first
    finally:
        writer.close()


async def main(task: dict) -> dict:
    rng, end = random.Random(task["seed"]), time.monotonic() + task["seconds"]
    counts, wrong, firsts = {"complete": 0, "cut": 0}, [], []

    async def user() -> None:
        await asyncio.sleep(rng.random() * min(5, task["seconds"] / 4))
        while (now := time.monotonic()) < end or (min(counts.values()) < task["at_least"] and now < end + 60):
            item = rng.choice(task["work"])
            cut_after = rng.random() ** 2 * task["longest_cut"] if rng.random() < 0.5 else None
            try:
                text, first = await stream(task["port"], item["body"], cut_after)
            except (ValueError, OSError, asyncio.IncompleteReadError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
                continue
            if text is None:
                counts["cut"] += 1
            else:
                counts["complete"] += 1
                firsts.append(first)
                if text != item["text"]:
                    wrong.append(f"{text!r} instead of {item['text']!r}")

    await asyncio.gather(*(user() for _ in range(task["concurrency"])))
    firsts.sort()
    median = firsts[len(firsts) // 2] if firsts else 0.0
    return counts | {"wrong": wrong[:20], "num_wrong": len(wrong), "median_seconds_to_first_text": median}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
