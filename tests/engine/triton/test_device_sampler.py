"""Tokens drawn on the device are those of the host's sampler and of the specification."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpretedFunction

from chatkv.engine.batch import SampleSpec
from chatkv.engine.device_sampler import DeviceSampler, DrawnToken
from chatkv.engine.request import SamplingParams
from chatkv.engine.sampler import Sampler
from chatkv.kernels import sampling_reference as reference
from chatkv.kernels.triton.sampling import BORDER_ROUNDINGS
from tests.kernels.triton import near_draws

CPU = torch.device("cpu")
EOS_IDS = frozenset({3, 17})
Words = np.ndarray


def spec(sampling: SamplingParams, position: int = 0, choice: int = 0) -> SampleSpec:
    return SampleSpec(sampling, choice, position, (), ())


def run(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    vocab_size: int | None = None,
    logit_rows: Sequence[int] | None = None,
    bitmask: Words | None = None,
) -> list[DrawnToken]:
    sampler = DeviceSampler(vocab_size or logits.shape[1], CPU)
    plan = sampler.prepare(specs, EOS_IDS, logit_rows, bitmask)
    return sampler.read(sampler.launch(logits, plan).packed, plan)


def ids_of(drawn: Sequence[DrawnToken]) -> list[int]:
    return [token.token_id for token in drawn]


def random_spec(random: Random, vocab_size: int, choice: int) -> SampleSpec:
    def some_ids() -> tuple[int, ...]:
        return tuple(random.choices(range(vocab_size), k=random.randrange(30)))

    sampling = SamplingParams(
        temperature=random.choice([0.0, 0.3, 0.8, 1.0, 2.0]),
        top_k=random.choice([0, 0, 1, 7, 36, 2000]),
        top_p=random.choice([1.0, 1.0, 1e-6, 0.1003, 0.5007, 0.9991]),
        min_p=random.choice([0.0, 0.0, 1e-4, 0.05, 0.99]),
        repetition_penalty=random.choice([1.0, 1.0, 0.5, 1.3, 10.0]),
        presence_penalty=random.choice([0.0, 0.0, -2.0, 0.7]),
        frequency_penalty=random.choice([0.0, 0.0, -1.0, 2.0]),
        logit_bias={
            random.randrange(2 * vocab_size): random.choice([-100.0, -1.0, 5.0, 8.0])
            for _ in range(random.choice([0, 0, 4]))
        },
        seed=random.randrange(-(2**63), 2**64),
        stop_token_ids=frozenset(random.choices(range(vocab_size), k=2)),
    )
    return SampleSpec(sampling, choice, random.randrange(10_000), some_ids(), some_ids(), random.random() < 0.4)


def changed(row: Tensor, one: SampleSpec, allowed: Words | None = None) -> Tensor:
    """Steps 1 to 3 of the specification."""
    sampling = one.sampling
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    logits = reference.penalize(row.double(), one.prompt_token_ids, one.output_token_ids, *penalties)
    banned = set(EOS_IDS | sampling.stop_token_ids) if one.is_eos_banned else set()
    if allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(row)]
        banned |= set(np.flatnonzero(bits == 0).tolist())
    bias = {token_id: value for token_id, value in sampling.logit_bias.items() if token_id < len(row)}
    return reference.bias_and_ban(logits, bias, {token_id for token_id in banned if token_id < len(row)})


def may_draw(token_id: int, logits: Tensor, one: SampleSpec) -> bool:
    """A changed logit was rounded once to float32."""
    sampling = one.sampling
    filters = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    uniform = reference.noise(sampling.seed, one.choice, one.position)
    best = logits[logits > -torch.inf].abs().max().item()
    roundings = BORDER_ROUNDINGS + 2 * (13 + best / max(sampling.temperature, 0.1))
    rounded = logits.float().double()
    return any(
        near_draws.may_draw(token_id, near, *filters, uniform, roundings * 2.0**-24) for near in (logits, rounded)
    )


@pytest.mark.parametrize(("vocab_size", "width"), [(50, 50), (2100, 2112)])
def test_every_mix_of_settings_draws_what_the_specification_draws(vocab_size: int, width: int) -> None:
    random = Random(vocab_size)
    logits = torch.randn(24, width, generator=torch.Generator().manual_seed(vocab_size)) * 4
    logits[12:] = logits[12:].round()  # ties
    specs = [random_spec(random, vocab_size, choice) for choice in range(24)]
    bitmask = np.full((24, -(-vocab_size // 32)), -1, np.int32)
    bitmask[::3] = np.random.default_rng(vocab_size).integers(-(2**31), 2**31, bitmask[::3].shape)
    drawn = run(logits, specs, vocab_size, bitmask=bitmask)
    assert all(token.is_finite for token in drawn)
    for row, (one, token) in enumerate(zip(specs, drawn, strict=True)):
        expected = changed(logits[row, :vocab_size], one, bitmask[row])
        assert may_draw(token.token_id, expected, one), (row, one)


@pytest.mark.parametrize("vocab_size", [37, 5000])
def test_tokens_are_those_of_the_hosts_sampler(vocab_size: int) -> None:
    random = Random(1)
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    specs = [random_spec(random, vocab_size, choice) for choice in range(16)]
    expected = Sampler(vocab_size).sample(logits, specs, EOS_IDS)
    assert ids_of(run(logits, specs)) == [token_id for token_id, _ in expected]


def test_histories_follow_a_sequence_from_step_to_step() -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.6, presence_penalty=0.4)
    logits = torch.linspace(1.0, 3.0, 40)[None]
    sampler, host = DeviceSampler(40, CPU), Sampler(40)
    written: list[int] = []
    for position in range(12):
        one = SampleSpec(sampling, 0, position, (39, 5), written)
        plan = sampler.prepare([one], EOS_IDS)
        token = sampler.read(sampler.launch(logits, plan).packed, plan)[0].token_id
        assert token == host.sample(logits, [one], EOS_IDS)[0][0]
        written.append(token)
    assert len(set(written)) > 3


def test_logprobs_are_those_of_the_hosts_sampler() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)) * 4
    logits[1] = logits[1].round()
    wanted = [None, 5, 0, 20]
    specs = [
        spec(
            SamplingParams(num_logprobs=number, temperature=1.5, logit_bias={7: 100.0} if number == 0 else {}), position
        )
        for position, number in enumerate(wanted)
    ]
    expected = Sampler(300).sample(logits, specs, EOS_IDS)
    for token, (token_id, logprob) in zip(run(logits, specs), expected, strict=True):
        assert token.token_id == token_id
        assert (token.logprob is None) == (logprob is None)
        if token.logprob is None or logprob is None:
            continue
        assert token.logprob.token_id == token_id
        assert token.logprob.logprob == pytest.approx(logprob.logprob, abs=1e-5, rel=1e-6)
        assert [other for other, _ in token.logprob.top] == [other for other, _ in logprob.top]
        assert [value for _, value in token.logprob.top] == pytest.approx(
            [v for _, v in logprob.top], abs=1e-5, rel=1e-6
        )


def test_more_logprobs_than_ids() -> None:
    (token,) = run(torch.arange(6.0)[None], [spec(SamplingParams(num_logprobs=20))])
    assert token.logprob is not None
    assert [token_id for token_id, _ in token.logprob.top] == [5, 4, 3, 2, 1, 0]


def test_choices_share_a_row_and_differ() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    sampling = SamplingParams(seed=5, repetition_penalty=1.2, num_logprobs=1)
    specs = [replace(spec(sampling, 9, choice), prompt_token_ids=(4, 8)) for choice in range(6)]
    drawn = run(logits, specs, logit_rows=[1] * 6)
    assert ids_of(drawn) == [token for token, _ in Sampler(50).sample(logits[[1] * 6], specs, EOS_IDS)]
    assert len(set(ids_of(drawn))) > 1


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    logits[1, 20] = torch.nan
    specs = [spec(SamplingParams(top_p=0.9, num_logprobs=2), position) for position in range(3)]
    drawn = run(logits, specs)
    assert [token.is_finite for token in drawn] == [True, False, True]
    expected = Sampler(50).sample(logits[[0, 2]], [specs[0], specs[2]], EOS_IDS)
    assert [drawn[0].token_id, drawn[2].token_id] == [token_id for token_id, _ in expected]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value by the Wilson-Hilferty approximation."""
    degrees = len(expected) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize(
    ("filters", "num_draws"),
    [
        ({}, 600),
        ({"top_k": 6, "top_p": 0.9}, 120),
        pytest.param({}, 2500, marks=pytest.mark.slow),
        pytest.param({"top_k": 12, "top_p": 0.9}, 500, marks=pytest.mark.slow),
        pytest.param({"min_p": 0.1, "temperature": 0.7}, 1000, marks=pytest.mark.slow),
    ],
)
def test_draws_follow_the_distribution(filters: dict[str, Any], num_draws: int) -> None:
    row = torch.randn(12, generator=torch.Generator().manual_seed(5))
    sampling = SamplingParams(seed=11, **filters)
    specs = [spec(sampling, position) for position in range(num_draws)]
    counts = np.bincount(ids_of(run(row[None], specs, logit_rows=[0] * num_draws)), minlength=12)
    expected = reference.distribution(
        row.double(), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    ).numpy()
    assert not counts[expected == 0].any()
    possible = expected > 0
    assert chi_square(counts[possible], expected[possible] * num_draws) > 1e-3


class NoWaiting(TorchFunctionMode):
    """Refuses what would wait for a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"}:
            raise AssertionError(f"{func.__name__} waits for the device")
        if func.__name__ == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            raise AssertionError("a boolean index waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    with NoWaiting():
        yield


def test_neither_preparing_nor_launching_waits_for_the_device() -> None:
    sampling = SamplingParams(top_k=5, top_p=0.9, min_p=0.01, presence_penalty=1.0, num_logprobs=2)
    one = SampleSpec(sampling, 0, 0, (1, 2), (3,), is_eos_banned=True)
    logits = torch.zeros(1, 40)
    sampler = DeviceSampler(40, CPU)
    with no_waiting():
        plan = sampler.prepare([one], EOS_IDS)
        sampled = sampler.launch(logits, plan)
    assert sampler.read(sampled.packed, plan)[0].is_finite
    assert sampled.token_ids.tolist() == ids_of(sampler.read(sampled.packed, plan))
    assert sampled.are_finite.tolist() == [1]


def compiled_kernels(run: Any, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What would be compiled: kernels with their constants, and the traits of arguments that triton specialises on."""
    seen: set[tuple[Any, ...]] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        traits = [
            (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, Tensor) else (arg == 1, arg % 16 == 0)
            for name, arg in zip(self.arg_names, args, strict=False)
            if name not in ("num_words", "num_top", "num_changes")
        ]
        seen.add((self.fn.__name__, *traits, *sorted(options.items())))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", note)
        run()
    return seen


def test_after_warming_up_no_step_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = DeviceSampler(500, CPU)
    warm = compiled_kernels(lambda: sampler.warm_up(torch.zeros(1, 512)), monkeypatch)
    assert len({name for name, *_ in warm}) == 8
    random = Random(7)
    for num_rows in (1, 2, 3, 5, 8, 16):
        specs = [random_spec(random, 500, 0) for _ in range(num_rows)]
        specs = [replace(one, sampling=replace(one.sampling, num_logprobs=random.choice([None, 3]))) for one in specs]
        plan = sampler.prepare(specs, EOS_IDS)
        logits = torch.zeros(num_rows, 512)
        step = compiled_kernels(lambda logits=logits, plan=plan: sampler.launch(logits, plan), monkeypatch)
        assert step <= warm


def test_a_plan_is_one_copy() -> None:
    sampling = SamplingParams(logit_bias={1: 2.0}, num_logprobs=2)
    plan = DeviceSampler(40, CPU).prepare([replace(spec(sampling), is_eos_banned=True)], EOS_IDS)
    assert plan.changes is not None
    settings, changes = plan.settings, plan.changes
    parts = [settings.numbers, settings.factors, settings.masks, plan.logprob_drawn_rows, plan.logprob_logit_rows]
    parts += [changes.logit_rows, changes.rows, changes.token_ids, changes.penalties, changes.subtracted]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.data_ptr() % 16 == 0 for part in parts)


def test_plain_rows_take_the_cheap_way() -> None:
    specs = [
        spec(SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)),  # greedy: no filter matters
        spec(SamplingParams(top_k=40)),
        SampleSpec(SamplingParams(temperature=0.7), 0, 0, (1, 2), (3,)),
    ]
    plan = DeviceSampler(40, CPU).prepare(specs, EOS_IDS, bitmask=np.full((3, 2), -1, np.int32))
    settings = plan.settings
    assert (settings.has_top_k, settings.has_top_p, settings.has_min_p) == (False, False, False)
    assert plan.changes is None
    assert len(settings.masks) == 0


def test_plans_that_do_not_fit_are_refused() -> None:
    sampler = DeviceSampler(40, CPU)
    with pytest.raises(ValueError, match="2 rows of logits for 1 token"):
        sampler.prepare([spec(SamplingParams())], EOS_IDS, [0, 1])
    with pytest.raises(ValueError, match="bitmask"):
        sampler.prepare([spec(SamplingParams())], EOS_IDS, bitmask=np.zeros((1, 1), np.int32))


def test_only_penalties_need_the_last_token() -> None:
    assert not SamplingParams(top_k=3, min_tokens=4, logit_bias={1: 2.0}).needs_history
    for penalty in ({"repetition_penalty": 0.9}, {"presence_penalty": -1.0}, {"frequency_penalty": 0.1}):
        assert SamplingParams(**penalty).needs_history  # type: ignore[arg-type]
