"""Turns sampled ids into what a client sees: text, finish reasons, progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .config import BLOCK_SIZE
from .request import (
    FinishReason,
    Progress,
    RequestOutput,
    TokenLogprob,
)
from .sequence import ActiveRequest, SequenceState

PROGRESS_INTERVAL_S = 0.1
"""Reading progress of one sequence is reported at most this often; changes of status or queue position always."""


class TextDelta(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def is_stopped(self) -> bool:
        """A stop string was met; `text` ends before it."""


class TextStream(Protocol):
    """The text of one answer."""

    def push(self, token_ids: Sequence[int]) -> TextDelta: ...

    def finish(self) -> str:
        """What was held back, at the end of the answer."""


TextStreamFactory = Callable[[Sequence[int], tuple[str, ...], str], TextStream]
"""(last ids of the prompt, stop strings, text at the end of the prompt that belongs to the answer) -> TextStream."""


class OutputProcessor:
    """Keeps one text stream per sequence that has tokens, and what was last reported of those that have none."""

    def __init__(
        self,
        new_text_stream: TextStreamFactory | None,
        eos_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._new_text_stream = new_text_stream
        self._eos_ids = eos_ids
        self._clock = clock
        self._streams: dict[SequenceState, TextStream] = {}
        self._reported: dict[SequenceState, tuple[Progress, float]] = {}

    def push(self, sequence: SequenceState, token_id: int, logprob: TokenLogprob | None) -> RequestOutput:
        """Appends the sampled id. The output has a finish reason if the answer ends here; stop ids give no text."""
        self._reported.pop(sequence, None)
        sampling = sequence.request.sampling
        is_banned = len(sequence.output_token_ids) < sampling.min_tokens
        sequence.output_token_ids.append(token_id)
        is_eos = token_id in self._eos_ids and not sampling.ignore_eos
        text, reason = "", None
        if (is_eos or token_id in sampling.stop_token_ids) and not is_banned:
            reason = FinishReason.STOP
        else:
            if (stream := self._stream(sequence)) is not None:
                delta = stream.push((token_id,))
                text = delta.text
                if delta.is_stopped:
                    reason = FinishReason.STOP
                    self._streams.pop(sequence)  # what it holds back lies behind the stop string
            if reason is None and sequence.num_tokens >= sequence.active.max_num_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            text += self._close(sequence)
        logprobs = (logprob,) if logprob is not None else ()
        return self._output(sequence, text=text, token_ids=(token_id,), logprobs=logprobs, finish_reason=reason)

    def end(self, sequence: SequenceState, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The last output of a cancelled or failed sequence, with the text held back so far."""
        return self._output(sequence, text=self._close(sequence), finish_reason=reason, error=error)

    def end_unstarted(self, active: ActiveRequest, reason: FinishReason, error: str | None) -> list[RequestOutput]:
        """The same for choices that no sequence stands for yet: the prompt is still being read for all of them."""
        first = active.sequences[0]
        if not first.is_at_first_token:
            return []
        return [
            self._output(first, index=choice, finish_reason=reason, error=error)
            for choice in range(1, active.request.n)
        ]

    def report_progress(
        self, waiting: Sequence[SequenceState], admitted: Sequence[SequenceState]
    ) -> list[RequestOutput]:
        """For sequences that are queued, loading or reading, where that has changed."""
        outputs = []
        for position, sequence in enumerate(waiting, start=1):
            outputs += self._progress(sequence, position)
        for sequence in admitted:
            if sequence.is_at_first_token or sequence.num_uncomputed_tokens > 1:
                outputs += self._progress(sequence, None)
        return outputs

    def _progress(self, sequence: SequenceState, queue_position: int | None) -> list[RequestOutput]:
        num_prompt = sequence.num_prompt_tokens
        num_computed = min(sequence.num_computed_tokens, num_prompt)
        progress = Progress(sequence.status, num_prompt, num_computed, queue_position)
        now = self._clock()
        last, last_s = self._reported.get(sequence, (None, 0.0))
        if progress == last:
            return []
        is_same_state = last is not None and last.status is progress.status and last.queue_position == queue_position
        if is_same_state and now - last_s < PROGRESS_INTERVAL_S:
            return []
        self._reported[sequence] = (progress, now)
        return [self._output(sequence, progress=progress)]

    def _stream(self, sequence: SequenceState) -> TextStream | None:
        if self._new_text_stream is None:
            return None
        stream = self._streams.get(sequence)
        if stream is None:
            request = sequence.request
            tail = request.prompt_token_ids[-BLOCK_SIZE:]
            stream = self._new_text_stream(tail, request.sampling.stop, request.resume_text)
            self._streams[sequence] = stream
        return stream

    def _close(self, sequence: SequenceState) -> str:
        self._reported.pop(sequence, None)
        stream = self._streams.pop(sequence, None)
        return stream.finish() if stream is not None else ""

    def _output(
        self,
        sequence: SequenceState,
        *,
        index: int | None = None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        progress: Progress | None = None,
    ) -> RequestOutput:
        active = sequence.active
        return RequestOutput(
            request_id=active.request.request_id,
            index=sequence.choice if index is None else index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            error=error,
            progress=progress,
            num_prompt_tokens=active.num_prompt_tokens,
            num_cached_tokens=active.num_cached_tokens,
            cached_by_tier=dict(active.cached_by_tier),
            miss=active.miss,
            load=active.load,
            block_hashes=tuple(node.block_hash for node in sequence.nodes) if finish_reason is not None else (),
        )
