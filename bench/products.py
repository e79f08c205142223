"""Time ``ds4jax.weights.linear`` for every tensor type, against a plain float32 product of the same size in the same run.

    python bench/products.py [--types Q8_0,Q4_K] [--rows 1,128] [--shape 4096x4096] [--matrices 8] [--layout cpu]

Cold figures, as a decode step sees them: the matrices differ from call to call, together more than the caches hold. Weights are
random. Milliseconds, the smallest and the median of the calls; "×" is the median divided by that of float32 ``W @ x``, timed
right before and after. A machine that does other things at the same time favours XLA over nothing here, but widens the spread:
look at both.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax import compilation, weights
from ds4ref.gguf import Tensor
from ds4ref.quants import BLOCK, PLAIN, TensorType, nbytes


def random_tensor(type, shape, rng):
    """Random codes; every scale is finite (bit 14 of its half floats is cleared)."""
    data = rng.integers(0, 256, nbytes(type, shape), dtype=np.uint8)
    blocks = data.reshape(-1, BLOCK[type][1])
    if type in (TensorType.F32, TensorType.F64, TensorType.F16, TensorType.BF16):
        width = BLOCK[type][1]
        data.reshape(-1, width)[:, width - 1] &= 0xBF  # the exponent's highest bit
    elif type is TensorType.MXFP4:
        blocks[:, 0] = 120
    else:
        blocks[:, scale_bytes(type)] &= 0xBF
    return Tensor("random", shape, type, data)


def scale_bytes(type):
    """The high bytes of a block's float16 scales."""
    size = BLOCK[type][1]
    two = {TensorType.Q4_1, TensorType.Q5_1, TensorType.Q4_K, TensorType.Q5_K}
    if type is TensorType.IQ1_M:
        return [size - 1]
    if type is TensorType.Q2_K:
        return [size - 3, size - 1]
    if type in (TensorType.Q3_K, TensorType.Q6_K):
        return [size - 1]
    return [1, 3] if type in two else [1]


def time_calls(f, matrices, x, seconds=0.6):
    """Seconds per call, matrices in turn."""
    for w in matrices:
        f(w, x).block_until_ready()
    taken, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds or len(taken) < 2 * len(matrices):
        w = matrices[len(taken) % len(matrices)]
        start = time.perf_counter()
        f(w, x).block_until_ready()
        taken.append(time.perf_counter() - start)
    return np.array(taken)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(t.name for t in TensorType if t not in PLAIN or t.name in ("F32", "F16")))
    parser.add_argument("--rows", default="1,128")
    parser.add_argument("--shape", default="4096x4096", help="N×K")
    parser.add_argument("--matrices", type=int, default=6)
    parser.add_argument("--layout", default="cpu", choices=weights.LAYOUTS)
    args = parser.parse_args()
    shape = tuple(map(int, args.shape.split("x")))
    rng = np.random.default_rng(0)
    rows = list(map(int, args.rows.split(",")))
    xs = {T: jnp.asarray(rng.standard_normal((T, shape[1]), dtype=np.float32)) for T in rows}
    options = compilation.compile_options()
    linear = jax.jit(weights.linear, compiler_options=options)
    dense = jax.jit(weights._dense_product, compiler_options=options)
    plain = [jnp.asarray(rng.standard_normal(shape, dtype=np.float32)) for _ in range(args.matrices)]
    print(f"{args.shape}, {args.matrices} matrices in turn, {jax.default_backend()}, layout {args.layout}")
    print(f"{'type':8} {'bytes':>6} {'pack MB/s':>9}" + "".join(f" | T={T:<4} min/median ms     ×f32" for T in rows))
    for name in args.types.split(","):
        type = TensorType[name]
        tensors = [random_tensor(type, shape, rng) for _ in range(args.matrices)]
        start = time.perf_counter()
        matrices = [weights.pack(t, args.layout) for t in tensors]
        speed = sum(t.nbytes for t in tensors) / (time.perf_counter() - start) / 1e6
        line = f"{name:8} {weights.nbytes(matrices[0]) / tensors[0].nbytes:6.2f} {speed:9.0f}"
        for x in xs.values():
            before = time_calls(dense, plain, x, 0.3)
            taken = 1e3 * time_calls(linear, matrices, x)
            peer = 1e3 * np.median(np.concatenate([before, time_calls(dense, plain, x, 0.3)]))
            line += f" | {taken.min():9.2f} / {np.median(taken):7.2f} {np.median(taken) / peer:8.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
