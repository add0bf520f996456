"""Sampling, with every kind of settings."""

from __future__ import annotations

import torch

from chatkv.engine.batch import SampleSpec
from chatkv.engine.device_sampler import DeviceSampler
from chatkv.engine.request import SamplingParams

VOCAB_SIZES = (49_152, 128_256, 151_936)
SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, logit_bias={3: 1.0}, num_logprobs=5),
)


def launch_sampling() -> None:
    device = torch.device("cpu")
    for vocab_size in VOCAB_SIZES:
        sampler = DeviceSampler(vocab_size, device)
        for settings in ([one] for one in SETTINGS):
            specs = [SampleSpec(one, 0, 7, (1, 2, 3), (4, 4, 5)) for one in settings]
            sampler.launch(torch.zeros(len(specs), vocab_size), sampler.prepare(specs, frozenset()))
        specs = [SampleSpec(one, 0, 7, (1, 2, 3), (4, 4, 5), is_eos_banned=True) for one in SETTINGS]
        sampler.launch(torch.zeros(len(specs), vocab_size), sampler.prepare(specs, frozenset({2})))
