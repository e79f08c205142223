"""Write a random artifact of a chosen size: a family's layer kinds and published tensor types, at a fraction of its widths.

It answers with noise, at the speed of a real model of its size: it exists to measure. Packed tensors are blocks of random
codes under chosen scales, generated and written in parts, so memory stays bounded. Values are of the size that training gives:
matrices keep the variance of what they multiply, and what is added to the residual is divided by √(2 · layers) (GPT-2's
initialisation, Radford et al. 2019). Letters: D hidden, K columns of a matrix.
"""

import re
from dataclasses import dataclass
from functools import cache, partial
from math import prod, sqrt

import numpy as np

from . import families, gguf_writer, quants
from .gguf import ArtifactError
from .quants import BLOCK, TensorType
from .tiny import Described, first, random_tensor, vocabulary

PART_BYTES = 8 << 20  # generated and written at a time
LEAST_LAYERS = 6  # every layer kind occurs, and half a layer is less than a tenth of the file


@dataclass(frozen=True)
class Widths:
    """What a shape is derived from; the number of layers then makes the size."""

    hidden: int
    experts: int
    vocabulary: int


WIDTHS = (Widths(256, 8, 1024), Widths(1024, 32, 8192), Widths(2048, 64, 16384), Widths(4096, 256, 131072))


def write(architecture, path, size, seed=0):
    """Write an artifact of ``architecture`` whose tensors take about ``size`` bytes to ``path``; the same seed, the same file.

    The size is met to within half a layer. ArtifactError for an architecture or a size that there is no shape for.
    """
    if architecture not in SHAPES:
        raise ArtifactError(f"architecture {architecture!r} cannot be scaled (those that can: {', '.join(sorted(SHAPES))})")
    metadata, shapes = _fitting(architecture, size)
    family = families.FAMILIES[architecture]
    layers = metadata[f"{architecture}.block_count"]
    tensors = {}
    for number, (name, shape) in enumerate(shapes.items()):
        type = _type(architecture, name, shape)
        parts = partial(_parts, family, metadata, name, type, shape, _deviation(name, shape, layers), (seed, number))
        tensors[name] = (parts, type, shape)
    metadata |= vocabulary(architecture, metadata[f"{architecture}.vocab_size"])
    gguf_writer.write(path, architecture, metadata, tensors)


def _fitting(architecture, size):
    """(metadata, tensor name → shape) nearest to ``size`` bytes: the largest widths that leave enough layers."""
    for widths in reversed(WIDTHS):
        least, more = (_nbytes(architecture, _described(architecture, widths, LEAST_LAYERS + n)[1]) for n in (0, 4))
        if size >= least:
            layers = LEAST_LAYERS + round(4 * (size - least) / (more - least))
            return _described(architecture, widths, layers)
    raise ArtifactError(f"the smallest scaled {architecture!r} has {least} bytes of tensors; {size} were asked for")


def _described(architecture, widths, layers):
    """(metadata without the tokenizer's, tensor name → shape) of a model of ``layers`` layers."""
    family = families.FAMILIES[architecture]
    keys = SHAPES[architecture](widths, layers) | {
        "block_count": layers,
        "embedding_length": widths.hidden,
        "vocab_size": widths.vocabulary,
    }
    metadata = {
        "general.name": f"ds4 scaled {architecture} (random)",
        "general.description": "random weights, for measuring speed; its answers are noise",
        "general.quantization_version": 2,
    }
    metadata |= family.tiny_metadata() | {f"{architecture}.{key}": value for key, value in keys.items()}
    required, _ = family.tensors(family.Config.from_metadata(Described(architecture, metadata)))
    shapes = {name: first(shape) for name, shape in required.items()}
    if architecture == "qwen35":
        shapes["output.weight"] = shapes["token_embd.weight"]
    return metadata, shapes


def _nbytes(architecture, shapes):
    return sum(quants.nbytes(_type(architecture, name, shape), shape) for name, shape in shapes.items())


def _step35(widths, layers):
    """One layer in four is full; 3/2 as many query heads in the others; one dense layer; clamps on the last two."""
    D = widths.hidden
    width = min(128, D // 4)
    full = np.arange(layers) % 4 == 0
    heads = D // width
    clamped = np.arange(layers) >= layers - 2
    return {
        "feed_forward_length": 11 * D // 4,
        "attention.head_count": np.where(full, heads, heads * 3 // 2).astype(np.int32),
        "attention.head_count_kv": np.full(layers, max(2, heads // 4), np.int32),
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": (~full).tolist(),
        "leading_dense_block_count": 1,
        "expert_count": widths.experts,
        "expert_used_count": min(8, widths.experts // 2),
        "expert_feed_forward_length": max(256, D // 4),
        "expert_shared_feed_forward_length": max(256, D // 4),
        "swiglu_clamp_exp": np.where(clamped, 7, 0).astype(np.float32),
        "swiglu_clamp_shexp": np.where(clamped, 16, 0).astype(np.float32),
    }


def _deepseek4(widths, layers):
    """Two window layers, then indexed and fully compressed ones in turn, as in Flash; the first three are hash-routed."""
    D = widths.hidden
    width = min(512, D // 4)
    i = np.arange(layers)
    return {
        "attention.head_count": 4 * D // width,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.q_lora_rank": D // 4,
        "attention.output_lora_rank": D // 4,
        "attention.output_group_count": 4,
        "attention.sliding_window": 128,
        "attention.compress_ratios": np.where(i < 2, 0, np.where(i % 2, 128, 4)).astype(np.int32),
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": min(128, width),
        "attention.indexer.top_k": 512,
        "rope.dimension_count": min(64, width // 2),
        "rope.scaling.original_context_length": 65536,
        "expert_count": widths.experts,
        "expert_used_count": min(6, widths.experts // 2),
        "expert_feed_forward_length": max(256, D // 4),
        "hash_layer_count": 3,
        "swiglu_clamp_exp": np.full(layers, 10, np.float32),
    }


def _qwen35(widths, layers):
    """Three value heads per key head, a quarter of each attention head rotated, no NextN block."""
    D = widths.hidden
    width, delta = min(256, D // 4), min(128, D // 4)
    heads, key_heads = D // width, D // (2 * delta)
    third = width // 8 // 3 + 1
    return {
        "feed_forward_length": 7 * D // 2,
        "attention.head_count": heads,
        "attention.head_count_kv": heads // 4,
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width // 4,
        "rope.dimension_sections": np.array([third, third, width // 8 - 2 * third, 0], np.int32),
        "ssm.state_size": delta,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": 3 * key_heads,
        "ssm.inner_size": 3 * key_heads * delta,
        "nextn_predict_layers": 0,
    }


SHAPES = {"deepseek4": _deepseek4, "qwen35": _qwen35, "step35": _step35}

MIXES = {
    # The Q2 file of Flash.
    "deepseek4": (
        (r"ffn_(gate|up)_exps", TensorType.IQ2_XXS),
        (r"ffn_down_exps", TensorType.Q2_K),
        (r"token_embd|hc_\w+_fn|compressor_(kv|gate|ape)|indexer\.|ffn_gate_inp", TensorType.F16),
        (r"tid2eid", TensorType.I32),
    ),
    # What llama.cpp's converter makes of the plain checkpoints (--outtype q8_0).
    "qwen35": ((r"ssm_conv1d", TensorType.F32),),
    # MQ83, its middle layers throughout.
    "step35": (
        (r"ffn_(gate|up)_exps", TensorType.IQ2_XXS),
        (r"ffn_down_exps", TensorType.Q4_K),
        (r"ffn_gate_inp", TensorType.F32),
    ),
}
"""Types of matrices by name; the first that matches. All other matrices are Q8_0, vectors F32."""


def _type(architecture, name, shape):
    if len(shape) == 1:
        return TensorType.F32
    return next((type for pattern, type in MIXES[architecture] if re.search(pattern, name)), TensorType.Q8_0)


def _deviation(name, shape, layers):
    """Standard deviation of a matrix: 1 for embeddings, 1/√K, less where the product is added to the residual."""
    if name == "token_embd.weight":
        return 1.0
    joins = re.search(r"\.(attn_output|attn_output_b|ssm_out|ffn_down(_exps|_shexp)?)\.weight", name)
    return 1 / sqrt(shape[-1] * (2 * layers if joins else 1))


def _parts(family, metadata, name, type, shape, deviation, seed):
    """The data of one tensor, some megabytes at a time."""
    rng = np.random.Generator(np.random.SFC64(seed))
    values, size = BLOCK[type]
    if type is TensorType.I32:
        experts = metadata["deepseek4.expert_count"]
        table = np.tile(np.arange(experts, dtype=np.int32), (shape[0], 1))
        yield np.ascontiguousarray(rng.permuted(table, axis=1)[:, : shape[1]])
    elif type is TensorType.F32:
        yield random_tensor(family, name, shape, rng)
    else:
        blocks = prod(shape) // values
        for start in range(0, blocks, PART_BYTES // size):
            count = min(PART_BYTES // size, blocks - start)
            if type is TensorType.F16:
                yield (deviation * rng.standard_normal(count, np.float32)).astype(np.float16)
            else:
                yield packed_blocks(type, count, deviation / _spread(type), rng)


def packed_blocks(type, count, scale, rng):
    """Random codes: uint8 [count, bytes of a block]. Scales of blocks vary from 3/4 to 5/4 of ``scale``, minima centre the
    values on zero. type: Q8_0, IQ2_XXS, Q4_K or Q2_K.
    """
    size = BLOCK[type][1]
    data = rng.bit_generator.random_raw(-(-count * size // 8)).view(np.uint8)[: count * size].reshape(count, size)
    d = (scale * rng.uniform(0.75, 1.25, count)).astype("<f2")
    if type is TensorType.Q4_K:  # d, minimum's d, 12 bytes of 6-bit scales and minima, codes 0 to 15
        _write_half(data, 0, d)
        _write_half(data, 2, d * np.float16(7.5))
        data[:, 8:12] = data[:, 4:8]
        data[:, 12:16] = (data[:, 12:16] & 15) * 17
    elif type is TensorType.Q2_K:  # 16 bytes of 4-bit scales and minima, codes 0 to 3, d, minimum's d
        data[:, :16] = (data[:, :16] & 15) * 17
        _write_half(data, 80, d)
        _write_half(data, 82, d * np.float16(1.5))
    else:
        _write_half(data, 0, d)
    return data


def _write_half(data, at, d):
    data[:, at : at + 2] = d.view(np.uint8).reshape(-1, 2)


@cache
def _spread(type):
    """Standard deviation of the values of random blocks of scale 1."""
    data = packed_blocks(type, 4096, 1.0, np.random.Generator(np.random.SFC64(0)))
    return float(quants.dequantize(data.reshape(-1), type, (4096 * BLOCK[type][0],)).std())
