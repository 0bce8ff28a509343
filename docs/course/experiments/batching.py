"""Eight requests in four places: static and continuous batching, step by step.

python docs/course/experiments/batching.py
"""

from dataclasses import dataclass, field

from dry import DryEngine, Scheduler, StaticScheduler

REQUESTS = {"A": (6, 18), "B": (3, 4), "C": (4, 9), "D": (5, 3), "E": (8, 6), "F": (2, 12), "G": (12, 5), "H": (3, 8)}
PLACES = 4


@dataclass
class Run:
    """What happened.

    places: of each place, a letter for each step: the request that ran there; lower case while it computes its prompt;
        "." if none did.
    first_token: request -> the step after which it had its first token.
    """

    places: list[str]
    first_token: dict[str, int] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.places[0])

    @property
    def busy(self) -> float:
        """The share of places in which a request ran."""
        return sum(step != "." for place in self.places for step in place) / (len(self.places) * self.num_steps)


def run(make_scheduler: type[Scheduler], budget: int = 16) -> Run:
    engine = DryEngine(num_blocks=64, max_num_seqs=PLACES, max_num_batched_tokens=budget, make_scheduler=make_scheduler)
    for name, (prompt, output) in REQUESTS.items():
        engine.add(name, prompt, output)
    place_of: dict[str, int] = {}
    result = Run([""] * PLACES)
    while engine.has_unfinished():
        engine.step()
        number = result.num_steps + 1
        row = ["."] * PLACES
        for seq, _ in engine.batch:
            if seq.request_id not in place_of:
                others = {*engine.running, *(other for other, _ in engine.batch)}
                taken = [place_of[other.request_id] for other in others if other.request_id in place_of]
                place_of[seq.request_id] = min(set(range(PLACES)) - set(taken))
            prefill = seq.request_id not in result.first_token
            row[place_of[seq.request_id]] = seq.request_id.lower() if prefill else seq.request_id
            if prefill and seq.output:
                result.first_token[seq.request_id] = number
        result.places = [place + letter for place, letter in zip(result.places, row, strict=True)]
    return result


def main() -> None:
    for title, make_scheduler in {"static": StaticScheduler, "continuous": Scheduler}.items():
        result = run(make_scheduler)
        waits = result.first_token.values()
        print(f"{title} batching: {result.num_steps} steps, {100 * result.busy:.0f} % of the places busy")
        print(f"first token after {sum(waits) / len(waits):.1f} steps on average, {max(waits)} at most")
        print("\n".join(f"  {place}" for place in result.places), end="\n\n")


if __name__ == "__main__":
    main()
