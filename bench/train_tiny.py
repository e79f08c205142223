"""Trains the artifact that lies inside the package (``ds4server/tiny.gguf``): a tiny K-EXAONE that has read one book.

    python bench/train_tiny.py bench/alice29.txt -o ds4server/tiny.gguf

``tiny_text.py`` says which text and where it comes from. What is trained is the arithmetic that serves: the layers and the
predictor (NextN) of ``ds4jax.families.exaone_moe``, on chunks of ``ds4jax.state``, differentiated as they are. Only the tile of
``ds4jax.attention`` is made as long as a row of the batch, since a loop whose bound the device alone knows has no reverse.
The predictor learns in the same steps, on the token after the next; towards the end it reads its own rows, too, as when drafts
are chained.

Why this family: its layers are attention alone, which trains fastest; its state can be cut, kept and copied without a
recurrence; its published files hold their predictor; and sliding layers that rotate beside one that does not (NoPE) go on
working behind the few hundred positions of the training.

Optimizer: Muon (Jordan et al. 2024: momentum, orthogonalised by Newton-Schulz steps) for the matrices of the blocks, Adam
(Kingma & Ba 2015) for the rest; one linear warm-up, one linear decay. At the end the weights are written twice, as float32 and
as Q8_0, and the first is held to the reference: logits of the training program within 1e-3 of ``ds4ref``'s.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from tiny_text import QUESTIONS, SYSTEMS, THOUGHTS, Book, Talks, read
from tokenizers import Regex, models, trainers
from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers as splits

from ds4jax import attention
from ds4jax.families import exaone_moe as arithmetic
from ds4jax.layers import layer_layout, layer_tensors
from ds4jax.state import Chunk, Sequences, allocate
from ds4ref import gguf_writer, tiny
from ds4ref.conversation import Conversation
from ds4ref.families import exaone_moe as family
from ds4ref.gguf import Artifact
from ds4ref.model import Model
from ds4ref.pretokenizers import RULES
from ds4ref.quants import TensorType
from ds4ref.tokenizer import ALPHABET, CONTROL, NORMAL, USER_DEFINED

ARCHITECTURE = "exaone-moe"
VOCABULARY = 1536
SHAPE = {
    "block_count": 5,
    "nextn_predict_layers": 1,
    "context_length": 65536,
    "embedding_length": 160,
    "vocab_size": VOCABULARY,
    "feed_forward_length": 448,
    "leading_dense_block_count": 4,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": 64,
    "rope.freq_base": 1e4,
    "rope.dimension_count": 32,
}
"""Four dense layers, three that slide and one that sees all, and the predictor; what is not here is as in a random toy."""

ROW = 192  # tokens of a row of the batch
CHAINED_FROM = 0.6  # share of the time from which the predictor learns from rows of its own, too
NAME = "Alice, a ds4 tiny K-EXAONE"
DESCRIPTION = (
    "2 million parameters, trained on Alice's Adventures in Wonderland (Lewis Carroll, 1865, public domain) by "
    "bench/train_tiny.py; it answers with passages of the book"
)


# The file


def vocabulary(text):
    """Tokenizer keys: bytes, merges learnt from ``text`` between the family's cuts, the family's special tokens."""
    control, user_defined = tiny.SPECIALS[ARCHITECTURE]
    library = Library(models.BPE())
    (pattern,) = RULES[ARCHITECTURE].patterns
    cut = splits.Split(Regex(pattern), "isolated")
    library.pre_tokenizer = splits.Sequence([cut, splits.ByteLevel(add_prefix_space=False, use_regex=False)])
    size = VOCABULARY - len(control) - len(user_defined)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=ALPHABET, show_progress=False, max_token_length=24)
    library.train_from_iterator(text, trainer)
    merges = json.loads(library.to_str())["model"]["merges"]
    tokens = [*ALPHABET, *("".join(pair) for pair in merges), *control, *user_defined]
    types = [NORMAL] * (256 + len(merges)) + [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    if len(tokens) != VOCABULARY or len(set(tokens)) != VOCABULARY:
        raise ValueError(f"the text gives {len(set(tokens))} entries of a vocabulary, not {VOCABULARY}")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": ARCHITECTURE,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": tokens.index(control[0]),
        "tokenizer.ggml.add_bos_token": False,
    }


def metadata(book):
    """All keys of the artifact."""
    named = {"general.name": NAME, "general.description": DESCRIPTION}
    shape = {f"{ARCHITECTURE}.{key}": value for key, value in SHAPE.items()}
    sliding = {f"{ARCHITECTURE}.attention.sliding_window_pattern": np.array([1, 1, 1, 0, 1], np.bool_)}
    said = [question for questions in QUESTIONS.values() for question in questions]
    return named | family.tiny_metadata() | shape | sliding | vocabulary([book.text, *said, *SYSTEMS, *THOUGHTS.values()])


def write(path, keys, params, quantised):
    """Write the artifact, matrices as Q8_0 or everything as float32."""
    tensors = {}
    for name, value in params.items():
        value = np.asarray(value, np.float32)
        if quantised and value.ndim == 2:
            data = gguf.quants.quantize(value, gguf.GGMLQuantizationType.Q8_0)
            tensors[name] = (np.ascontiguousarray(data).reshape(-1).view(np.uint8), TensorType.Q8_0, value.shape)
        else:
            tensors[name] = value
    gguf_writer.write(path, ARCHITECTURE, keys, tensors)


# The model


def beginning(config, seed):
    """Random weights by name: matrices scaled by their input, those that end a block's branch smaller, norms one."""
    rng = np.random.default_rng(seed)
    required, _ = family.tensors(config)
    params = {}
    for name, shape in required.items():
        if "norm" in name:
            values = np.ones(shape)
        else:
            small = 1 / np.sqrt(2 * config.layers) if name.endswith(("attn_output.weight", "ffn_down.weight")) else 1.0
            values = rng.standard_normal(shape) * small / np.sqrt(shape[-1])
        params[name] = jnp.asarray(values, jnp.float32)
    return params


def states(config, i, size):
    """Fresh components of block i for one sequence of ``size`` tokens."""
    layouts = family.layout(config) if i < config.layers else family.draft_layouts(config)[0]
    layout = layer_layout(layouts, i)
    chunk = Chunk(jnp.zeros(1, jnp.int32), jnp.full(1, size, jnp.int32), size, size)
    return Sequences(layout, {name: allocate(kind, 1, 1, size) for name, kind in layout.items()}, chunk)


def trunk(config, params, tokens):
    """tokens [T] → (the last layer's output [1, T, D], the model's ends by name)."""
    top = {name: value for name, value in params.items() if not name.startswith("blk.")}
    x = arithmetic.start(config, top, tokens[None], None)
    for i in range(config.layers):
        x = arithmetic.layer(config, i, layer_tensors(params, "blk.{i}.", i), states(config, i, len(tokens)), x)
    return x, top


def logits(config, params, tokens):
    """Logits of tokens [T]: the trunk's [T, V] of the next, and the predictor's [T − 1, V] of the one after that and
    [T − 2, V] of the third, from rows of its own. It sees no other's rows then, where serving keeps those of the trunk."""
    x, top = trunk(config, params, tokens)
    w, rows, found = layer_tensors(params, "blk.{i}.", config.layers), arithmetic.draft_input(config, top, x), []
    for ahead in (1, 2):
        following = tokens[None, ahead:]
        state = states(config, config.layers, following.shape[1])
        rows = arithmetic.draft_block(config, 0, top, w, state, rows[:, :-1], following)
        found.append(arithmetic.draft_logits(config, 0, top, w, rows)[0])
    return arithmetic.finish(config, top, x)[0], *found


# Training


def losses(config, params, tokens, weights, chained):
    """(mean cross-entropy, how often right) over a batch [B, T], of the next token, of the one after and, if ``chained``, of
    the third."""
    rows = jax.vmap(lambda row: logits(config, params, row))(tokens)[: 3 if chained else 2]
    found = []
    for ahead, row in enumerate(rows, 1):
        target, weight = tokens[:, ahead:], weights[:, ahead:]
        row = row[:, : target.shape[1]]
        picked = jnp.take_along_axis(jax.nn.log_softmax(row), target[..., None], axis=-1)[..., 0]
        right = jnp.argmax(row, axis=-1) == target
        total = jnp.sum(weight)
        found.append((-jnp.sum(weight * picked) / total, jnp.sum(weight * right) / total))
    return found


def orthogonal(g):
    """The nearest semi-orthogonal matrix, about, by five Newton-Schulz steps."""
    x = g if g.shape[0] <= g.shape[1] else g.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if g.shape[0] <= g.shape[1] else x.T


def turned(name, value):
    """Whether Muon moves this parameter; Adam moves the ends of the model and what is no matrix."""
    return value.ndim == 2 and name.startswith("blk.")


def step(config, rates, chained, params, moments, count, scale, tokens, weights):
    """One step of the optimizer. moments: name → (mean, mean of squares), the second unused by Muon."""

    def loss(params):
        found = losses(config, params, tokens, weights, chained)
        return sum(share * found for share, (found, _) in zip((1.0, 0.7, 0.3), found, strict=False)), found

    (_, found), grads = jax.value_and_grad(loss, has_aux=True)(params)
    new, kept = {}, {}
    for name, g in grads.items():
        mean, square = moments[name]
        if turned(name, g):
            mean = 0.95 * mean + g
            move = rates["muon"] * orthogonal(g + 0.95 * mean) * max(1.0, g.shape[0] / g.shape[1]) ** 0.5
        else:
            mean, square = 0.9 * mean + 0.1 * g, 0.98 * square + 0.02 * g * g
            corrected = jnp.sqrt(square / (1 - 0.98**count))
            move = rates["adam"] * (mean / (1 - 0.9**count)) / (corrected + 1e-8)
        new[name], kept[name] = params[name] - scale * move, (mean, square)
    return new, kept, found


def train(config, params, talks, args):
    """The trained parameters. Losses are printed; checkpoints go beside the output."""
    moments = {
        name: (jnp.zeros_like(v), jnp.zeros_like(v) if not turned(name, v) else jnp.zeros(1)) for name, v in params.items()
    }
    rates = {"muon": args.muon, "adam": args.adam}
    programs = {
        chained: jax.jit(partial(step, config, rates, chained), donate_argnums=(0, 1)) for chained in (False, True)
    }  # fmt: skip
    begun, shown, n, done = time.time(), [], 0, 0.0
    while done < 1:
        n += 1
        rows = [(talks.row if r % 2 else talks.passage)(ROW) for r in range(args.batch)]
        tokens, weights = (np.stack(part) for part in zip(*rows, strict=True))
        scale = min(1.0, n / 30) * (1.02 - done)
        advance = programs[done > CHAINED_FROM]
        params, moments, found = advance(params, moments, jnp.float32(n), jnp.float32(scale), tokens, weights)
        shown.append(np.array(found[:2]).reshape(-1))
        done = (time.time() - begun) / (60 * args.minutes)
        if n % 25 == 0 or done >= 1:
            mean = np.mean(shown, axis=0)
            words = " ".join(f"{loss:.3f}/{right:.3f}" for loss, right in mean.reshape(-1, 2))
            print(f"step {n}, {done:.0%}: loss/share right of the next token and the one after: {words}", flush=True)
            shown = []
        if n % 200 == 0:
            np.savez(args.out.with_suffix(".npz"), **{name: np.asarray(value) for name, value in params.items()})
    return params


def check(config, path, params, conversation):
    """The largest distance between the training program's logits and the reference's on the float32 file at ``path``."""
    model = Model.open(path)
    tokens = np.array(conversation.encode_raw("Alice thought she might as well wait, as she had nothing else to do."), np.int32)
    ours = np.asarray(jax.jit(lambda params: logits(config, params, tokens)[0])(params))
    return float(np.abs(ours - model.verify(model.new_state(), tokens.tolist())).max())


def arguments():
    parser = argparse.ArgumentParser(description="Train the artifact inside the package.")
    parser.add_argument("text", type=Path, help="the book, see tiny_text.py")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write; .f32.gguf beside it: float32")
    parser.add_argument("--minutes", type=float, default=45, help="how long to train; the step size falls with it")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, half running text, half conversations")
    parser.add_argument("--muon", type=float, default=0.03, help="step size of the blocks' matrices")
    parser.add_argument("--adam", type=float, default=4e-3, help="step size of the rest")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = arguments()
    attention.TILE = max(attention.TILE, ROW)  # no loop over tiles, see above
    book = Book(read(args.text))
    keys = metadata(book)
    config = family.Config.from_metadata(tiny.Described(ARCHITECTURE, keys))
    params = beginning(config, args.seed)
    print(f"{sum(v.size for v in params.values()):,} parameters", flush=True)
    plain = args.out.with_suffix(".f32.gguf")
    write(plain, keys, params, quantised=False)
    conversation = Conversation(Artifact.open(plain))
    talks = Talks(book, conversation, args.seed)
    print(f"{len(talks.whole):,} tokens of {len(book.text):,} characters", flush=True)
    params = train(config, params, talks, args)
    write(plain, keys, params, quantised=False)
    write(args.out, keys, params, quantised=True)
    far = check(config, plain, params, conversation)
    print(f"logits of the training program and of the reference are within {far:.1e} of each other")
    if far > 1e-3:
        raise SystemExit("that is more than rounding: the two do not compute the same model")


if __name__ == "__main__":
    main()
