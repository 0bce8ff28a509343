"""What a call of `LLMEngine.step` has done: its batches, and its StepStats. The engine decides nothing by them."""

from dataclasses import dataclass, field

from nanopage.engine.schedule import Schedule
from nanopage.engine.scheduler import Scheduler
from nanopage.outputs import StepStats
from nanopage.step import BatchResult


@dataclass(slots=True)
class StepRecord:
    """A step: its schedule, the batches whose results it has taken, and those that are still in flight."""

    stats: StepStats = field(default_factory=StepStats)
    scheduled: Schedule | None = None
    completed: list[Schedule] = field(default_factory=list)
    in_flight: list[Schedule] = field(default_factory=list)


def count_batch(stats: StepStats, schedule: Schedule) -> None:
    """Count what a step has submitted."""
    batch = schedule.batch
    stats.decode_tokens = sum(
        count
        for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True)
        if start >= seq.num_prompt_tokens
    )
    stats.prefill_tokens = batch.num_tokens - stats.decode_tokens
    stats.context_tokens = sum(batch.starts) + batch.num_tokens
    stats.cached_tokens = schedule.num_cached_tokens
    stats.preempted = len(schedule.preempted)
    stats.swapped_out, stats.swapped_in = len(batch.swap_out), len(batch.swap_in)
    stats.copied = len(batch.copies)


def count_result(stats: StepStats, schedule: Schedule, result: BatchResult, num_taken: int) -> None:
    """Count the results of a batch. Args: num_taken: tokens that sequences took."""
    stats.prepare_seconds += result.prepare_seconds
    stats.model_seconds += result.model_seconds
    stats.sample_seconds += result.sample_seconds
    stats.wait_seconds += result.wait_seconds
    stats.device_seconds += result.device_seconds
    stats.encoder_cache = result.encoder_cache
    stats.output_tokens += num_taken
    for (_, draft), accepted in zip(schedule.drafted, schedule.num_accepted, strict=True):
        stats.count_draft(len(draft), accepted)


def count_state(stats: StepStats, scheduler: Scheduler) -> None:
    """Count sequences and blocks as they are after a step."""
    manager = scheduler.block_manager
    running = [seq for group in scheduler.running for seq in group.live]
    stats.running, stats.stored_tokens = len(running), sum(seq.num_computed_tokens for seq in running)
    stats.waiting = sum(len(group.live) for group in scheduler.waiting)
    stats.swapped = sum(len(group.live) for group in scheduler.swapped)
    stats.cached_blocks = manager.num_cached_blocks
    stats.free_blocks = manager.num_free_blocks - stats.cached_blocks
    stats.used_blocks = manager.num_blocks - manager.num_free_blocks
