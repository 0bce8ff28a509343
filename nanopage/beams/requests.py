"""The requests of beam searches, and the sequences that are their beams."""

from functools import partial

from nanopage.beams.search import Beam, BeamSearch, BeamStep, Hypothesis
from nanopage.engine.input_processor import InputProcessor
from nanopage.engine.output_processor import Request
from nanopage.engine.sequence import Adapter, Sequence, SequenceGroup
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.params import BeamSearchParams
from nanopage.step import SamplingSettings
from nanopage.text.prompts import TokenizedPrompt
from nanopage.text.tokenizer import Tokenizer


class Beams:
    """The beams of a request, for its group (its `Search`, see engine/sequence.py)."""

    def __init__(self, search: BeamSearch):
        self.search = search
        # The choice that the sequences do not show yet: the step, and (sequence, tokens, cumulative log-probability) of
        # each next beam.
        self.next: tuple[BeamStep, list[tuple[Sequence, list[int], float]]] | None = None

    @property
    def finished(self) -> bool:
        return self.search.finished

    def choose(self, group: SequenceGroup) -> tuple[list[Sequence], list[tuple[Sequence, Sequence]]]:
        """Choose `next` from the candidates of the present beams.

        Returns: the beams that end; (parent, sequence) for each beam that forks from another.
        """
        parents = group.live
        step = self.search.choose(
            [Beam(seq.output_token_ids, seq.cumulative_logprob, seq.candidates) for seq in parents]
        )
        survivors = set() if step.finished else {index for index, _, _ in step.live}
        ending = [seq for index, seq in enumerate(parents) if index not in survivors]
        spare = [seq for seq in group.seqs if seq.dormant] + ending
        forks, live = [], []
        for index, token_id, cumulative_logprob in [] if step.finished else step.live:
            seq = parent = parents[index]
            if index in survivors:  # its first successor is the same sequence
                survivors.remove(index)
            else:
                seq = spare.pop()
                forks.append((parent, seq))
            live.append((seq, [*parent.token_ids, token_id], cumulative_logprob))
        self.next = step, live
        return ending, forks

    def adopt(self, group: SequenceGroup) -> None:
        """Make `next` the state of the group. If an exception interrupts this, call it again."""
        if self.next is None:
            return
        step, live = self.next
        self.search.accept(step)
        for seq in group.seqs:
            seq.candidates = {}
            seq.dormant = not step.finished and all(seq is not other for other, _, _ in live)
        for seq, token_ids, cumulative_logprob in live:
            seq.token_ids, seq.cumulative_logprob, seq.block_hashes = token_ids, cumulative_logprob, []
        self.next = None

    def add_outputs(
        self, group: SequenceGroup, params: BeamSearchParams, tokenizer: Tokenizer | None, output: RequestOutput
    ) -> None:
        """Add the hypotheses, best first, followed by the live beams if the search was cut short."""
        hypotheses = list(self.search.hypotheses)
        if not self.finished:
            beams = [seq for seq in group.seqs if not seq.dormant]
            reason = "abort" if group.error is None else "error"
            hypotheses += [Hypothesis(b.output_token_ids, b.cumulative_logprob, None, reason) for b in beams]

        def text_of(hypothesis: Hypothesis) -> str:
            """As the text of a sample, without the end-of-sequence token."""
            token_ids = hypothesis.token_ids[:-1] if hypothesis.finish_reason == "stop" else hypothesis.token_ids
            return "" if tokenizer is None else tokenizer.decode(token_ids, params.skip_special_tokens)

        output.outputs = [
            CompletionOutput(
                index,
                text_of(hypothesis),
                hypothesis.token_ids,
                hypothesis.cumulative_logprob,
                finish_reason=hypothesis.finish_reason,
                score=hypothesis.score,
            )
            for index, hypothesis in enumerate(hypotheses[: params.width])
        ]


def make_request(
    processor: InputProcessor,
    request_id: str,
    prompt: TokenizedPrompt,
    params: BeamSearchParams,
    priority: int,
    adapter: Adapter | None,
) -> Request:
    """A beam search. Raises: ValueError if its beams could never run together."""
    num_tokens, eos = len(prompt.token_ids), processor.model_config.eos_token_ids
    max_tokens = min(params.max_tokens, processor.max_model_len - num_tokens)
    beams = Beams(BeamSearch(params.width, max_tokens, params.length_penalty, params.early_stopping, eos))
    processor.check_size("width", params.width, num_tokens, max_tokens)
    settings = SamplingSettings(temperature=0, logprobs=beams.search.num_candidates)
    limit, salt = num_tokens + max_tokens, prompt.cache_salt
    seqs = [
        Sequence(next(processor.seq_ids), prompt.token_ids, settings, max_total_tokens=limit, cache_salt=salt)
        for _ in range(params.width)
    ]
    group = SequenceGroup(request_id, seqs, priority, beams, False, adapter, prompt.items, prompt.keys)
    fill = partial(beams.add_outputs, group, params, processor.tokenizer)
    return Request(group, params, prompt.text, prompt.token_ids, [], fill, encoder=prompt.encoder)
