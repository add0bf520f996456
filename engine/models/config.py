"""The shape of a model, read from a Hugging Face `config.json` and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import BrokenModelError, UnsupportedModelError
from .architectures import ARCHITECTURES
from .rope import RopeConfig

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_head_tied: bool
    layer_windows: tuple[int | None, ...]
    """Per layer: how many positions a row sees, itself included; None: all."""
    layer_ropes: tuple[bool, ...]
    """Per layer: whether queries and keys are rotated."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Raises UnsupportedModelError naming what chatkv cannot run, BrokenModelError naming a missing field."""
        name = architecture_name(config)
        architecture = ARCHITECTURES[name]
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise UnsupportedModelError(
                f"Weights quantised by {method!r} are not supported. Choose fp16 or a GGUF file."
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"Activation {config['hidden_act']!r} is not supported; chatkv runs 'silu'.")
        try:
            num_layers = int(config["num_hidden_layers"])
            # Before anything is built per layer: a damaged file may ask for billions.
            if not 1 <= num_layers <= MAX_LAYERS:
                raise BrokenModelError(f"config.json asks for {num_layers} layers; 1 to {MAX_LAYERS} are possible.")
            num_heads = int(config["num_attention_heads"])
            has_attention_bias = bool(config.get("attention_bias", False))
            model = cls(
                architecture=name,
                vocab_size=int(config["vocab_size"]),
                hidden_size=int(config["hidden_size"]),
                intermediate_size=int(config["intermediate_size"]),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or architecture.head_dim or config["hidden_size"] // num_heads),
                rms_norm_eps=float(config["rms_norm_eps"]),
                max_positions=int(config["max_position_embeddings"]),
                rope=RopeConfig.from_hf(config),
                has_qkv_bias=architecture.has_qkv_bias or (architecture.reads_attention_bias and has_attention_bias),
                has_output_bias=architecture.reads_attention_bias and has_attention_bias,
                has_mlp_bias=architecture.reads_mlp_bias and bool(config.get("mlp_bias", False)),
                has_qk_norm=architecture.has_qk_norm,
                is_head_tied=bool(config.get("tie_word_embeddings", architecture.is_head_tied)),
                layer_windows=architecture.layer_windows(config),
                layer_ropes=architecture.layer_ropes(config),
            )
        except KeyError as error:
            raise BrokenModelError(f"config.json lacks {error}: the model directory is incomplete.") from None
        except (TypeError, ValueError) as error:
            raise BrokenModelError(f"config.json holds a value of the wrong kind: {error}.") from None
        model._validate()
        return model

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_untied_head(self) -> bool:
        return not self.is_head_tied

    def _validate(self) -> None:
        sizes = ("vocab_size hidden_size intermediate_size num_heads num_kv_heads head_dim max_positions").split()
        for size in sizes:
            if getattr(self, size) < 1:
                raise BrokenModelError(f"config.json: {size} must be at least 1, got {getattr(self, size)}.")
        if self.num_heads % self.num_kv_heads:
            raise BrokenModelError(
                f"config.json: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly."
            )
        if not len(self.layer_windows) == len(self.layer_ropes) == self.num_layers:
            raise BrokenModelError(f"config.json: a list of layer kinds does not name all {self.num_layers} layers.")
        if self.head_dim % 2:
            raise BrokenModelError(f"config.json: head_dim must be even, got {self.head_dim}.")


def architecture_name(config: dict[str, Any]) -> str:
    """The registry's name of a config's architecture; refuses others by name."""
    names = config.get("architectures") or []
    by_type = {a.model_type: name for name, a in ARCHITECTURES.items()}
    name = str(names[0]) if names else by_type.get(str(config.get("model_type")), str(config.get("model_type")))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"Architecture {name!r} is not one that chatkv runs ({', '.join(ARCHITECTURES)}). Choose another model."
        )
    return name
