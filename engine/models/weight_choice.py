"""In which format a model's weights run, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch

from chatkv.kernels import KernelChoice
from chatkv.kernels.cpu.native.lowering import HEAD_MULTIPLE
from chatkv.kernels.cpu.native.model import why_none_here
from chatkv.kernels.weights import GROUP_SIZE, FpWeight

from ..quant.formats import PackedTensor
from ..quant.spec import QuantSpec, WeightFormat, spec_of
from .config import ModelConfig
from .quantised import Shapes, spec_of_tensor
from .weights_file import MappedWeights

AS_IN_FILE = "as in the model's file"


class WeightChoice(NamedTuple):
    spec: QuantSpec | None
    """What float matrices become; None: nothing is changed."""
    reason: str
    """For people."""


def choose_weights(
    asked: WeightFormat | QuantSpec, kernels: KernelChoice, config: ModelConfig, source: MappedWeights, shapes: Shapes
) -> WeightChoice:
    """What was quantised before is kept exactly, whatever is asked for.

    "auto" is the CPU's: floats in 8 bits where the native kernels can then run the model, which is many times as fast
    and costs next to nothing in quality; elsewhere as in the file. A GPU's planner gives a `QuantSpec`.
    """
    floats = [name for name in source.tensor_names if isinstance(source.read(name, shapes[name]), FpWeight)]
    if not floats or asked == "as-is":
        return WeightChoice(None, AS_IN_FILE)
    if asked == "auto":
        if _can_run_natively(kernels, config, floats, shapes):
            return WeightChoice(spec_of("int8"), "made from the model's floats, so that the native kernels run it")
        return WeightChoice(None, AS_IN_FILE)
    spec = asked if isinstance(asked, QuantSpec) else spec_of(asked)
    assert spec is not None
    if spec.kind == "bf16" and kernels.device != "cpu":
        return WeightChoice(None, f"{AS_IN_FILE}, floats in 16 bits on the GPU")  # Rounded on the way there.
    if not any(_can_become(spec, name, source.read(name, shapes[name])) for name in floats):
        return WeightChoice(None, AS_IN_FILE)
    reason = "as there is room for it" if isinstance(asked, QuantSpec) else f'as weight_format = "{asked}" asks'
    return WeightChoice(spec, f"made from the model's floats, {reason}")


def _can_become(spec: QuantSpec, name: str, tensor: PackedTensor) -> bool:
    own = spec_of_tensor(spec, name)
    if own is None or not isinstance(tensor, FpWeight):
        return False
    return tensor.values.dtype == torch.float32 if own.kind == "bf16" else own.fitting(tensor.shape[1]) is not None


def _can_run_natively(kernels: KernelChoice, config: ModelConfig, floats: list[str], shapes: Shapes) -> bool:
    """Whether native kernels will run the model once its floats are in 8 bits; known before they are."""
    return (
        kernels.device == "cpu"
        and kernels.cpu_kernels == "auto"
        and config.head_dim % HEAD_MULTIPLE == 0
        and all(shapes[name][1] % GROUP_SIZE == 0 for name in floats)
        and why_none_here() is None
    )
