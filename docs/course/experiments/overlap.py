"""The real engine before a device that only keeps time: steps one after the other, and with async scheduling.

python docs/course/experiments/overlap.py
"""

from dataclasses import dataclass, field

from nanopage import EngineConfig, SamplingParams
from nanopage.engine.engine import LLMEngine
from nanopage.step import Batch, BatchResult, Capacity
from nanopage.weights import hub, loader

# In units of half a millisecond. The host's times are about those of a small batch; see `bench.py host`.
SCHEDULE, SUBMIT, UPDATE, STEP = 2, 1, 3, 10


@dataclass
class Work:
    """Something that the host or the device did.

    kind: of the host "schedule", "submit", "wait" or "update"; of the device "step".
    """

    kind: str
    step: int
    start: int
    end: int


@dataclass
class VirtualDevice:
    """An executor on a virtual clock. The engine calls it as it calls the workers' executors."""

    clock: int = 0  # of the host
    host: list[Work] = field(default_factory=list)
    device: list[Work] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)  # in flight
    num_results: int = 0

    def start(self) -> Capacity:
        return Capacity("cpu", "float32", num_blocks=64, num_host_blocks=0, max_model_len=512)

    def submit(self, batch: Batch) -> None:
        number = len(self.device) + 1
        self._spend("schedule", number, SCHEDULE)
        self._spend("submit", number, SUBMIT)
        free = self.device[-1].end if self.device else 0
        begin = max(self.clock, free)
        self.device.append(Work("step", number, begin, begin + STEP))
        self.batches.append(batch)

    def result(self) -> BatchResult:
        self.num_results += 1
        number = self.num_results
        end = self.device[number - 1].end
        self._spend("wait", number, max(0, end - self.clock))
        self._spend("update", number, UPDATE)
        return BatchResult([1000 + number for _ in self.batches.pop(0).sampled_rows])

    def _spend(self, kind: str, step: int, time: int) -> None:
        if time:
            self.host.append(Work(kind, step, self.clock, self.clock + time))
        self.clock += time

    def rest(self) -> None: ...

    def discard(self) -> None: ...

    def add_masks(self, masks: dict[int, bytes]) -> None: ...

    def check(self) -> None: ...

    def compile(self, on_progress=None) -> None: ...

    def call(self, method, *arguments) -> None: ...

    def shutdown(self) -> None: ...


def run(async_scheduling: bool, num_tokens: int = 5) -> VirtualDevice:
    """One request that gets `num_tokens` tokens."""
    path = hub.resolve(None)
    device = VirtualDevice()
    config = EngineConfig(device="cpu", async_scheduling=async_scheduling, generation_config="vllm")
    engine = LLMEngine(config, loader.read_config(path), path, None, device)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    engine.add_request("A", {"prompt_token_ids": [1, 2, 3]}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return device


def main() -> None:
    for async_scheduling in (False, True):
        device = run(async_scheduling)
        busy = STEP * len(device.device) / device.clock
        print(f"async_scheduling={async_scheduling}: {device.clock / 2:g} ms, the device is busy {100 * busy:.0f} %")
        for name, works in {"host": device.host, "device": device.device}.items():
            row = [" "] * device.clock
            for work in works:
                letter = str(work.step) if work.kind == "step" else {"wait": "."}.get(work.kind, work.kind[0])
                row[work.start : work.end] = [letter] * (work.end - work.start)
            print(f"  {name:6} {''.join(row).rstrip()}")


if __name__ == "__main__":
    main()
