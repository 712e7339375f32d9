"""Shortest first by an output length that is predicted from the requests that ended before."""

from __future__ import annotations

from collections.abc import Iterator

from infermix.roles.request import FinishReason, Sequence
from infermix.toolkit.iteration import IterationScheduler
from infermix.toolkit.waiting import KeyedQueue

#: What the newest output counts in a mean; an output counts half as much after three more of its group.
NEWEST = 0.2

#: All requests; those of one tenant and category; of these, those with prompts of 2^k to 2^(k+1) - 1 tokens.
Group = tuple[()] | tuple[str, str] | tuple[str, str, int]


def groups_of(sequence: Sequence) -> Iterator[Group]:
    """The finest first."""
    request = sequence.request
    yield (request.tenant, request.category, sequence.num_prompt_tokens.bit_length() - 1)
    yield (request.tenant, request.category)
    yield ()


def final_output(sequence: Sequence) -> int:
    """Output tokens of a sequence that ended by itself.

    Tokens in flight behind a stop are thrown away. At the limit of its length a sequence has none, but for
    simulated ones, whose whole output counts as in flight.
    """
    if sequence.finish_reason is FinishReason.STOP:
        return len(sequence.tokens) - sequence.num_prompt_tokens
    return sequence.num_output_tokens


class OutputPredictor:
    """Exponentially weighted means of the outputs of ended sequences, by group.

    A prediction is the mean of the finest group of which a sequence has ended, and never above `max_new_tokens`,
    which it is while nothing has ended. The first output of a group is its first mean. What was aborted or refused
    teaches nothing. Two biases that no mean of ended requests is free of: short outputs end first, so early means are
    low; and what `max_new_tokens` cut off counts as it came out.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, open predictions included."""
        self._means: dict[Group, float] = {}
        #: What was predicted for sequences that have not ended; `None` where nothing had ended before.
        self._open: dict[int, float | None] = {}
        self._num_predicted = self._num_unpredicted = 0
        self._error_tokens = 0.0

    def predict(self, sequence: Sequence) -> float:
        """Output tokens to expect; the error of this prediction counts when the sequence ends."""
        most = sequence.request.sampling.max_new_tokens
        mean = next((self._means[group] for group in groups_of(sequence) if group in self._means), None)
        predicted = self._open[sequence.seq_id] = None if mean is None else min(mean, most)
        return most if predicted is None else predicted

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence, predicted or not, that is gone for good."""
        known = sequence.seq_id in self._open
        predicted = self._open.pop(sequence.seq_id, None)
        if sequence.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        output = final_output(sequence)
        if predicted is not None:
            self._num_predicted += 1
            self._error_tokens += abs(predicted - output)
        elif known:
            self._num_unpredicted += 1
        for group in groups_of(sequence):
            mean = self._means.get(group, output)
            self._means[group] = mean + NEWEST * (output - mean)

    def counters(self) -> dict[str, float]:
        """Ended sequences with and without a prediction, and the sum of its absolute errors in tokens.

        Sums, so that replicas can be added up; their quotient is the mean absolute error.
        """
        return {
            "predicted_outputs": float(self._num_predicted),
            "unpredicted_outputs": float(self._num_unpredicted),
            "predicted_output_error_tokens": self._error_tokens,
        }


class PredictedShortestScheduler(IterationScheduler):
    """The shortest predicted output first; `token_s` seconds of waiting make up for one predicted token.

    A prediction is made when a sequence is queued and stays: what ends later moves nobody who waits already, and a
    preempted sequence keeps its rank. So the bound of `shortest_queue` holds as it stands, with n and m the tokens
    that were predicted: n is at most `max_new_tokens`, however wrong the prediction is.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, chunked: bool, *, swap: bool, watermark: float,
                 token_s: float) -> None:  # fmt: skip
        predictor = self._predictor = OutputPredictor()
        queue = KeyedQueue(lambda sequence, now_s: now_s + token_s * predictor.predict(sequence))
        super().__init__(max_num_seqs, max_num_batched_tokens, chunked, swap=swap, waiting=queue, watermark=watermark)

    def finish(self, sequence: Sequence) -> None:
        super().finish(sequence)
        self._predictor.ended(sequence)

    def reset(self) -> None:
        self._predictor.reset()

    def counters(self) -> dict[str, float]:
        return self._predictor.counters()
