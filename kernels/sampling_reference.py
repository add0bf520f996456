"""How a token is drawn: the specification, in plain float64 torch, of every faster sampler.

The order of steps, each skipped at its neutral value:

1. repetition penalty over prompt and answer: positive logits are divided by it, others multiplied (Keskar et al., CTRL,
   2019); then frequency penalty times the count and presence penalty once, over the answer only (as OpenAI does);
2. logit bias is added;
3. banned ids become impossible, unless that would leave none;
4. temperature 0: the highest logit, the lowest id among equals. Else logits are divided by the temperature;
5. top-k keeps the k most likely ids; 6. top-p keeps the fewest of the most likely of those whose share reaches p
   (Holtzman et al., 2019); 7. min-p keeps ids at least min_p times as likely as the best. Among equally likely ids at a
   border the lower id stays. One id at least always stays;
8. one number in [0, 1), a function of (seed, choice, position) only, picks from the cumulative distribution over the
   kept ids in ascending order.

So a row's token depends on no other row, no batch size and no device but for rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def noise(seed: int, choice: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 bits. SplitMix64's finaliser (Steele et al., 2014) over the three in turn."""
    state = 0
    for word in (seed, choice, position):
        state = _mix((state ^ word) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def penalize(
    logits: Tensor,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> Tensor:
    """Step 1. logits: float64 [vocab] -> float64 [vocab], a new tensor."""
    logits = logits.clone()
    for token_id in {*prompt_ids, *output_ids}:
        value = logits[token_id]
        logits[token_id] = value / repetition_penalty if value > 0 else value * repetition_penalty
    for token_id in output_ids:
        logits[token_id] -= frequency_penalty
    for token_id in set(output_ids):
        logits[token_id] -= presence_penalty
    return logits


def bias_and_ban(logits: Tensor, logit_bias: Mapping[int, float], banned_ids: Collection[int]) -> Tensor:
    """Steps 2 and 3. float64 [vocab] -> float64 [vocab], a new tensor."""
    logits = logits.clone()
    for token_id, bias in logit_bias.items():
        logits[token_id] += bias
    banned = logits.clone()
    for token_id in banned_ids:
        banned[token_id] = -torch.inf
    return banned if bool((banned > -torch.inf).any()) else logits


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Steps 4 to 7. float64 [vocab] -> probabilities, float64 [vocab], zero where an id was filtered out."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(torch.float64)
    weights = torch.exp((logits - logits.max()) / temperature)
    order = torch.argsort(weights, descending=True, stable=True)
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1.0:
        cumulative = torch.cumsum(weights[order], 0)
        order = order[: int((cumulative < top_p * weights[order].sum()).sum()) + 1]
    order = order[weights[order] >= min_p]
    kept = torch.zeros_like(weights)
    kept[order] = weights[order]
    return kept / kept.sum()


def pick(probabilities: Tensor, uniform: float) -> int:
    """Step 8. float64 [vocab], a number in [0, 1) -> token id."""
    cumulative = torch.cumsum(probabilities, 0)
    token_id = int(torch.searchsorted(cumulative, uniform * cumulative[-1].item(), right=True))
    last_possible = int(torch.nonzero(probabilities)[-1])
    return min(token_id, last_possible)


def raw_logprobs(logits: Tensor) -> Tensor:
    """What is reported as logprobs: of the model's own distribution, before any step above. float64 [vocab]."""
    return torch.log_softmax(logits, dim=-1)
