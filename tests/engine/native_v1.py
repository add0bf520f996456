"""Writes weights as chatkv did before it stored tiles."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from chatkv.engine.models.source import WeightSource
from chatkv.engine.quant.formats import parts_of

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int8: "I8"}


def write_v1(source: WeightSource, folder: Path, weight_format: str, *, is_aligned: bool = True) -> str:
    """model.safetensors, config.json and chatkv.json; returns the content hash. The very first were not aligned."""
    digest, body, header = hashlib.sha256(), bytearray(), {}
    for name, tensor in source.tensors():
        for part_name, part in parts_of(name, tensor).items():
            data = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            frame = json.dumps([part_name, DTYPES[part.dtype], list(part.shape)]).encode()
            digest.update(len(frame).to_bytes(4, "little") + frame + data)
            if is_aligned and (gap := -len(body) % 64):
                offsets = [len(body), len(body) + gap]
                header[f"padding.{len(header)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": offsets}
                body += bytes(gap)
            offsets = [len(body), len(body) + len(data)]
            header[part_name] = {"dtype": DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": offsets}
            body += data
    facts = {"format": "chatkv-weights-1", "content_sha256": digest.hexdigest(), "weight_format": weight_format}
    text = json.dumps({"__metadata__": facts, **header}).encode()
    text = text.ljust(len(text) + -(len(text) + 8) % (64 if is_aligned else 8))
    weights = folder / "model.safetensors"
    weights.write_bytes(len(text).to_bytes(8, "little") + text + body)
    config = folder / "config.json"
    config.write_text(json.dumps(source.hf_config))
    files = {
        file.name: {
            "size": file.stat().st_size,
            "mtime_ns": file.stat().st_mtime_ns,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in (config, weights)
    }
    size_bytes = sum(fact["size"] for fact in files.values())
    manifest = {"name": "old", "content_sha256": digest.hexdigest(), "size_bytes": size_bytes, "files": files}
    (folder / "chatkv.json").write_text(json.dumps(manifest))
    return digest.hexdigest()
