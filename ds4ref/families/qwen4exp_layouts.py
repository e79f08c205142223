"""The tensors of Qwen3.8-Flash-Next in its two layouts: which there are, and how both are read in one way.

The *published* layout and that of *llama.cpp's* converter differ in names, in what some values mean, and in the order of
the delta net's value heads: grouped by key head in the first, tiled in the second. The model is written in llama.cpp's
names and meaning; :class:`Named` gives it the published layout in the same. The order of the heads is left to the model.

Letters as in ``qwen4exp.py``; E experts, F expert width. Knows nothing about what the tensors are for.
"""

import re

import numpy as np

from .. import moe

# Names within a block, llama.cpp's → published. Mixers are below; all other names are equal.
PUBLISHED = {
    "attn_qkv.weight": "linear_attn.qkv.weight",
    "attn_gate.weight": "linear_attn.z.weight",
    "ssm_conv1d.weight": "linear_attn.conv.weight",
    "ssm_a": "linear_attn.a_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_alpha.weight": "linear_attn.in_a.weight",
    "ssm_beta.weight": "linear_attn.in_b.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out.weight",
    "indexer.q_proj.weight": "attn_index_qk.weight",
    "indexer.k_proj.weight": "attn_index_qk.weight",
    "indexer.q_norm.weight": "attn_index_q_norm.weight",
    "indexer.k_norm.weight": "attn_index_k_norm.weight",
    "ffn_gate_inp_shexp.weight": "ffn_shexp_gate_inp.weight",
    "ple_key.weight": "ple.key.weight",
    "ple_value.weight": "ple.value.weight",
    "ple_conv1d.weight": "ple.conv.weight",
    "ple_norm_key.weight": "ple.key_norm.weight",
    "ple_norm_query.weight": "ple.query_norm.weight",
    "ple_norm_conv.weight": "ple.conv_norm.weight",
}
# Mixers: hc_attn_down → hc_attn.mix_down and so on; the last one, output_hc_*, is hc_input.*.
MIXER = re.compile(r"((?:mtp\.)?(?:output_hc|hc_attn|hc_ffn))_(norm|down|up|inject)\.weight")


def published_name(name):
    """The published layout's name of a tensor that llama.cpp's layout calls ``name``."""
    block, rest = re.fullmatch(r"((?:mtp\.)?blk\.\d+\.)?(.*)", name).groups(default="")
    if mixer := MIXER.fullmatch(rest):
        site, part = mixer.groups()
        return f"{block}{site.replace('output_hc', 'hc_input')}.{part if part in ('norm', 'inject') else 'mix_' + part}.weight"
    return block + PUBLISHED.get(rest, rest)


class Named:
    """Weights of either layout by llama.cpp's names and in its meaning of the values.

    The published layout stores what a norm's factor differs from 1 by, the logarithm of the decay rates, the indexer's
    queries and key in one matrix, and the experts' down matrices in two column ranges.
    """

    def __init__(self, c, w):
        self.c, self.w, self.dtype = c, w, w.dtype

    def __getitem__(self, name):
        if not self.c.published:
            return self.w[name]
        x = self.w[published_name(name)]
        kind = name.rpartition("blk.")[2].partition(".")[2]
        if kind == "ssm_a":
            return -np.exp(x)
        if kind in ("ssm_conv1d.weight", "ple_conv1d.weight"):
            return x[:, 0]
        if kind == "ffn_gate_inp_shexp.weight":
            return x[0]
        if kind == "indexer.q_proj.weight":
            return x[: -self.c.index_width]
        if kind == "indexer.k_proj.weight":
            return x[-self.c.index_width :]
        return 1 + x if "norm" in name and kind != "ssm_norm.weight" else x

    def part(self, name, index):
        if self.c.published and name.endswith("ffn_down_exps.weight"):
            stem = name.removesuffix("weight")
            return np.concatenate([self.w.part(f"{stem}{part}.weight", index) for part in ("main", "tail")], axis=1)
        return self.w.part(name, index)


def tensors(c):
    """(required, optional): tensor name → shape, in the names of the file's layout."""
    D, wide = c.width, c.streams * c.width
    required = {"token_embd.weight": (c.vocabulary, D), "output.weight": (c.vocabulary, D)} | _mixer(c, "output_hc_")
    for i in range(c.layers):
        required |= _block(c, f"blk.{i}.", c.recurrent[i])
    n, p = c.ngrams, f"blk.{c.ngrams.layer}."
    required |= {f"{p}ple_key.weight": (wide, n.width), f"{p}ple_value.weight": (D, n.width)}
    required |= {f"{p}ple_norm_{x}.weight": (wide,) for x in ("key", "query", "conv")}
    required |= {f"{p}ple_conv1d.weight": (wide, n.taps)} | dict.fromkeys(n.table, (n.part_rows, n.row))
    if not c.published:
        if c.predictors:
            p = f"blk.{c.layers}."
            required |= _block(c, p, False) | {f"{p}nextn.eh_proj.weight": (D, 2 * D), f"{p}nextn.enorm.weight": (D,)}
            required[f"{p}nextn.hnorm.weight"] = (wide,)
        return required, {}
    if c.predictors:
        required |= _block(c, "mtp.blk.0.", False) | _mixer(c, "mtp.output_hc_")
        required |= {f"mtp.fc_{x}.weight": (D, D) for x in ("embedding", "hidden")}
        required |= {"mtp.fc_embedding_norm.weight": (D,), "mtp.fc_hidden_norm.weight": (wide,)}
    required = _published_tensors(c, required)
    required |= {f"{p}ple.layer_multipliers": (n.order,)}
    required |= {f"{p}ple.head_{x}": (len(n.hash.sizes),) for x in ("offsets", "vocab_sizes")}
    return required | (_vision_tensors(c.vision) if c.vision else {}), {}


def _block(c, p, recurrent):
    """Tensors of one block by llama.cpp's names."""
    D, E, F, d = c.width, c.experts, c.expert_width, c.head_width
    block = _mixer(c, f"{p}hc_attn_", inject=True) | _mixer(c, f"{p}hc_ffn_", inject=True)
    if recurrent:
        values = c.value_heads * c.value_width
        block |= {f"{p}attn_qkv.weight": (channels(c), D), f"{p}attn_gate.weight": (values, D)}
        block |= {f"{p}ssm_out.weight": (D, values), f"{p}ssm_conv1d.weight": (channels(c), c.taps)}
        block |= {f"{p}ssm_{x}.weight": (c.value_heads, D) for x in ("alpha", "beta")}
        block |= {f"{p}ssm_a": (c.value_heads,), f"{p}ssm_dt.bias": (c.value_heads,), f"{p}ssm_norm.weight": (c.value_width,)}
    else:
        block |= {f"{p}attn_q.weight": (2 * c.heads * d, D), f"{p}attn_output.weight": (D, c.heads * d)}
        block |= {f"{p}attn_{x}.weight": (c.kv_heads * d, D) for x in "kv"}
        block |= {f"{p}attn_{x}_norm.weight": (d,) for x in "qk"}
        block |= {f"{p}indexer.q_proj.weight": (c.index_heads * c.index_width, D)}
        block |= {f"{p}indexer.k_proj.weight": (c.index_width, D)}
        block |= {f"{p}indexer.{x}_norm.weight": (c.index_width,) for x in "qk"}
    block |= moe.expert_tensors(p, E, D, F) | moe.shared_tensors(p, D, c.shared_width)
    return block | {f"{p}ffn_gate_inp.weight": (E, D), f"{p}ffn_gate_inp_shexp.weight": (D,)}


def _mixer(c, p, inject=False):
    wide = c.streams * c.width
    mixer = {f"{p}norm.weight": (wide,), f"{p}down.weight": (c.rank, wide), f"{p}up.weight": (wide, c.rank)}
    return mixer | ({f"{p}inject.weight": (c.streams, wide)} if inject else {})


def channels(c):
    """Channels of the delta net's convolution: q, k and v of all heads."""
    return 2 * c.key_heads * c.key_width + c.value_heads * c.value_width


def _published_tensors(c, tensors):
    """The same tensors as the published layout has them."""
    out, tails = {}, iter(c.expert_tails)
    for name, shape in tensors.items():
        stem = name.removesuffix("weight")
        if name.endswith("ffn_down_exps.weight"):
            tail = next(tails)
            out |= {f"{stem}main.weight": (*shape[:2], shape[2] - tail), f"{stem}tail.weight": (*shape[:2], tail)}
            continue
        if name.endswith("conv1d.weight"):
            shape = (shape[0], 1, shape[1])
        elif name.endswith("ffn_gate_inp_shexp.weight"):
            shape = (1, *shape)
        elif "indexer" in name and name.endswith("_proj.weight"):
            shape = ((c.index_heads + 1) * c.index_width, c.width)
        out[published_name(name)] = shape
    return out


def _vision_tensors(v):
    W, merged = v.width, v.width * v.merge**2
    shapes = {
        "vision.patch_embed": (W, 3, v.frames, v.patch, v.patch),
        "vision.merger.norm": (W,),
        "vision.merger.ffn_up": (merged, merged),
        "vision.merger.ffn_down": (v.out, merged),
    }
    for j in range(v.layers):
        p = f"vblk.{j}."
        shapes |= {f"{p}norm1": (W,), f"{p}norm2": (W,), f"{p}attn_qkv": (3 * W, W), f"{p}attn_output": (W, W)}
        shapes |= {f"{p}ffn_up": (v.feed_forward, W), f"{p}ffn_down": (W, v.feed_forward)}
    biases = {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    shapes["vision.position_embd"] = (v.positions, W)
    return {f"{name}.weight": shape for name, shape in shapes.items()} | biases


def tail_widths(artifact, layers, width):
    """Per block, and for the draft block last: how many input columns of the experts' down matrices the tail tensor holds.

    Without the tensor (a description, not a file): what does not fill a block of 256, at most a quarter.
    """
    names = [f"{p}ffn_down_exps.tail.weight" for p in (*(f"blk.{i}." for i in range(layers)), "mtp.blk.0.")]
    stored = [artifact.tensors.get(name) for name in names]
    return tuple(tensor.shape[-1] if tensor else min(width % 256 or width, width // 4) for tensor in stored)
