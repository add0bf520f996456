"""In which format a model's weights run, and why."""

from __future__ import annotations

from typing import NamedTuple

from chatkv.kernels import KernelChoice
from chatkv.kernels.cpu.native.lowering import HEAD_MULTIPLE
from chatkv.kernels.cpu.native.model import why_none_here
from chatkv.kernels.weights import GROUP_SIZE, FpWeight

from ..quant.spec import QuantSpec, WeightFormat, cpu_spec, gpu_spec
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
    asked: WeightFormat, kernels: KernelChoice, config: ModelConfig, source: MappedWeights, shapes: Shapes
) -> WeightChoice:
    """What was quantised before is kept exactly, whatever is asked for.

    "auto" on the CPU: floats in 8 bits where the native kernels can then run the model, which is several times as fast
    and costs next to nothing in quality; elsewhere as in the file. A GPU's memory decides there: its planner asks for a
    format by name.
    """
    floats = [name for name in source.tensor_names if isinstance(source.read(name, shapes[name]), FpWeight)]
    if not floats or asked == "as-is":
        return WeightChoice(None, AS_IN_FILE)
    if kernels.device != "cpu":
        return WeightChoice(None, AS_IN_FILE) if asked == "auto" else _made(gpu_spec(asked), asked, floats, shapes)
    if asked != "auto":
        return _made(cpu_spec(asked), asked, floats, shapes)
    obstacle = _why_not_native(kernels, config, floats, shapes)
    if obstacle is not None:
        return WeightChoice(None, AS_IN_FILE)
    return WeightChoice(cpu_spec("int8"), "made from the model's floats, so that the native kernels run it")


def _made(spec: QuantSpec | None, asked: str, floats: list[str], shapes: Shapes) -> WeightChoice:
    assert spec is not None
    wanted = [(spec_of_tensor(spec, name), shapes[name][1]) for name in floats]
    if not any(own is not None and own.fitting(columns) for own, columns in wanted):
        return WeightChoice(None, f"{AS_IN_FILE}: its matrices do not divide into the groups of {spec.name}")
    return WeightChoice(spec, f'made from the model\'s floats, as weight_format = "{asked}" asks')


def _why_not_native(kernels: KernelChoice, config: ModelConfig, floats: list[str], shapes: Shapes) -> str | None:
    """Known before the weights are made; None: the native kernels will run them."""
    if kernels.cpu_kernels == "torch":
        return "torch was asked for"
    if config.head_dim % HEAD_MULTIPLE:
        return f"the head size is not a multiple of {HEAD_MULTIPLE}"
    if any(shapes[name][1] % GROUP_SIZE for name in floats):
        return f"some matrices do not divide into groups of {GROUP_SIZE}"
    return why_none_here()
