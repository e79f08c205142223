"""Which of JAX's platforms computes, and why; and what programs for it may hold. ``python -m ds4jax.platforms`` prints both.

A platform is one of three: "cuda", "metal", "cpu". Behind "metal" stands a plugin: jax-mps, which JAX calls "mps", or
Apple's jax-metal, which it calls "METAL" (as metaljax does). Their programs are traced with the profile "metal" of
:mod:`ds4jax.primitives`; ALLOWED and DTYPES are what they may hold then, REFUSED why not the rest. docs/platforms.md is the
longer account. Loads no model, and knows nothing about families.
"""

import argparse
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import jax

from . import primitives
from .weights import default_layout

NAMES = ("auto", "cuda", "metal", "cpu")
LAST_JAX_OF_JAX_METAL = (0, 5, 0)
"""jax-metal 0.1.1 of October 2024, its last release, fails from JAX 0.5.1 on: github.com/jax-ml/jax/issues/27062 and 34109."""

JAX = "https://github.com/jax-ml/jax/issues/"
MPS = "https://github.com/tillahoffmann/jax-mps/"
TORCH = "https://github.com/pytorch/pytorch/issues/"


class PlatformError(ValueError):
    """The platform asked for is not here. One sentence."""


@dataclass(frozen=True)
class Found:
    """Devices of one kind that JAX sees. platform: its name for them ("gpu", "mps", "METAL", "cpu"); package: whose plugin."""

    platform: str
    kind: str
    count: int = 1
    package: str | None = None


@dataclass(frozen=True)
class Platform:
    """What was chosen. jax: JAX's name of it; package: the distribution behind it; profile, layout and dtype: how programs are
    traced, weights kept and state and operands rounded unless something else is asked for; why: one sentence.
    """

    name: str
    jax: str
    package: str
    profile: str
    layout: str
    dtype: str
    why: str

    @contextmanager
    def active(self):
        """Inside, arrays and programs go to this platform's first device, and programs are traced with its profile."""
        with jax.default_device(jax.devices(self.jax)[0]), primitives.using(self.profile):
            yield self


def choose(requested="auto", available=None, jax_version=None):
    """The :class:`Platform` for ``requested``, one of NAMES. available: as :func:`found` gives it; jax_version: numbers.

    auto takes cuda, then metal, then cpu. PlatformError, one sentence, for another name or one that is not here. jax-metal is
    taken only where it is asked for, and ``why`` says so, since it does not run on the JAX that this package needs.
    """
    available = found() if available is None else available
    current = jax.__version_info__ if jax_version is None else jax_version
    if requested not in NAMES:
        raise PlatformError(f"platform {requested!r} is unknown; {', '.join(NAMES[:-1])} or {NAMES[-1]} is accepted")
    devices = [device for device in map(_named, available) if device]
    stale = [device for name, device in devices if _stale(device, current)]
    if requested == "auto":
        wanted = [(name, device) for name, device in devices if device not in stale]
    else:
        wanted = [(name, device) for name, device in devices if name == requested]
    if not wanted:
        seen = ", ".join(sorted({device.platform for device in available})) or "nothing"
        raise PlatformError(f"platform {requested} is not here: JAX sees {seen}; {_remedy(requested)}")
    name, device = min(wanted, key=lambda one: (NAMES.index(one[0]), _stale(one[1], current)))
    return _platform(name, device, requested, stale)


def defaults(name):
    """(layout of the weights, dtype) on a platform of ours, whether it is here or not."""
    return default_layout(name), "bfloat16" if name == "cuda" else "float32"


def exact():
    """From here on, every product whose operands are float32 is computed from all of their bits, on every platform: a GPU would
    else take ten of 23 (TF32). Of a model of dtype "float32", nothing is then approximate but what float32 itself rounds."""
    jax.config.update("jax_default_matmul_precision", "highest")


def _platform(name, device, requested, stale):
    package = device.package or {"cuda": "jax-cuda12-plugin", "cpu": "jaxlib"}.get(name, device.platform)
    what = f"{device.count} × {device.kind}" if device.count > 1 else device.kind
    if requested != "auto":
        why = f"{name} was asked for; {package} has {what}"
        if device in stale:
            why += f", though jax-metal is known to fail from JAX 0.5.1 on ({JAX}27062); jax-mps is the plugin that is kept up"
    elif name == "cpu":
        why = "JAX has no accelerator that ds4jax knows here"
        if stale:
            why = f"jax-metal is installed, but fails from JAX 0.5.1 on ({JAX}27062); jax-mps would be taken"
    else:
        why = f"{package} has {what}"
    return Platform(name, device.platform, package, primitives.profile_of(device.platform), *defaults(name), why)


def _named(device):
    """(our name, device), or None for what ds4jax has no programs for: TPUs, AMD's GPUs."""
    name = device.platform.lower()
    if name in primitives.APPLE:
        return "metal", device
    if name in ("gpu", "cuda"):
        return None if "rocm" in (device.package or "") else ("cuda", device)
    return ("cpu", device) if name == "cpu" else None


def _stale(device, current):
    return device.package == "jax-metal" and tuple(current[:3]) > LAST_JAX_OF_JAX_METAL


def _remedy(requested):
    return {
        "cuda": "pip install 'ds4[cuda]' brings NVIDIA's plugin",
        "metal": "pip install 'ds4[metal]' brings jax-mps, the plugin for Apple's GPUs",
    }.get(requested, "JAX_PLATFORMS may hide it")


def found():
    """Every kind of device that JAX sees, its plugin named by what is installed."""
    from jax.extend import backend

    out = []
    for client in backend.backends().values():
        devices = client.local_devices()
        if devices:
            package = _package(client.platform.lower(), client.platform_version)
            out.append(Found(client.platform, devices[0].device_kind, len(devices), package))
    return out


def _package(platform, described):
    """The distribution whose plugin this is. described: JAX's words about its version."""
    if platform == "metal":
        return next(filter(_installed, ("metaljax", "jax-metal")), None)
    if platform in ("gpu", "cuda"):
        cuda = "jax-cuda13-plugin" if _installed("jax-cuda13-plugin") else "jax-cuda12-plugin"
        return "jax-rocm" if "rocm" in described.lower() else cuda
    return {"mps": next(filter(_installed, ("jax-mps", "jax-metallib")), None), "cpu": "jaxlib"}.get(platform)


def _installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# What programs with the profile "metal" may hold.

ELEMENTWISE = (
    "abs add and ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p "
    "logistic lt max min mul ne neg not or pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sqrt square sub tanh xor"
)
PLACES = (
    "bitcast_convert_type broadcast_in_dim concatenate copy dot_general dynamic_slice dynamic_update_slice gather iota "
    "optimization_barrier pad reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reshape slice split squeeze "
    "stack stop_gradient transpose"
)
CALLS = "closed_call custom_jvp_call custom_vjp_call custom_vmap_call jit pjit scan while"
ALLOWED = frozenset(f"{ELEMENTWISE} {PLACES} {CALLS}".split())
"""JAX's primitives whose StableHLO jax-mps executes (its handlers, commit 9cc6ce6 of July 2026) and against which no report on
jax-metal 0.1.1 is known; docs/platforms.md has what is open on older versions. A ``while`` whose end only the device knows
costs jax-mps one synchronisation a round (https://github.com/tillahoffmann/jax-mps/issues/193)."""

REFUSED = {
    "scatter": ("jax-mps lets updates beyond an axis land in the next row or bank", f"{MPS}issues/240"),
    "scatter-add": ("as scatter", f"{MPS}issues/240"),
    "sort": ("MPSGraph's argsort, below jax-metal, left what is beyond the 256th element unset (int64)", f"{TORCH}155560"),
    "top_k": ("jax-metal loses NaN and does not state the order of equals", f"{JAX}21397"),
    "population_count": ("jax-metal cannot compile popcnt", f"{JAX}28460"),
    "clz": ("jax-metal cannot compile count_leading_zeros", f"{JAX}21389"),
    "cumsum": ("lowers to reduce_window, which jax-metal cannot compile", f"{JAX}21387"),
    "reduce_window_sum": ("jax-metal cannot compile reduce_window", f"{JAX}21387"),
    "argmax": ("a reduction of two operands, which jax-metal could not compile", f"{JAX}21384"),
    "argmin": ("as argmax", f"{JAX}21384"),
    "cond": ("jax-metal cannot serialise some branches", f"{JAX}21601"),
    "rev": ("jax-mps 0.10 misread reversed views in later operations", f"{MPS}issues/232"),
    "custom_call": ("jax-metal compiles none", f"{JAX}16287"),
}
"""What else ds4jax's programs would hold or might come to: primitive → (why not, where that is reported)."""

DTYPES = frozenset({"bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"})
REFUSED_DTYPES = {
    "float64": ("Metal has no double", f"{JAX}20938"),
    "int64": ("only with JAX's 64-bit mode, which jax-metal cannot run", f"{JAX}21840"),
    "uint64": ("as int64", f"{JAX}21840"),
    "complex64": ("jax-metal has no complex numbers", f"{JAX}16416"),
    "int4": ("jax-metal fails on it, and jax-mps has no such type", f"{JAX}21883"),
    "uint4": ("as int4", f"{MPS}blob/main/README.md"),
    "float8_e4m3fn": ("jax-mps has no such type", f"{MPS}blob/main/README.md"),
}


def main(argv=None):
    """Print what is chosen and why, then what programs for it do without. Returns the exit code: 2 when it is not here."""
    parser = argparse.ArgumentParser(prog="python -m ds4jax.platforms", description="Which platform JAX computes on, and why.")
    parser.add_argument("platform", nargs="?", default="auto", help=f"one of {', '.join(NAMES)} (default: auto)")
    args = parser.parse_args(argv)
    try:
        chosen = choose(args.platform)
    except PlatformError as error:
        print(f"ds4jax.platforms: {error}", file=sys.stderr)
        return 2
    print(f"{chosen.name}: {chosen.why}")
    print(f"JAX calls it {chosen.jax}; plugin {chosen.package}, JAX {jax.__version__}")
    print(f"programs: profile {chosen.profile}; weights: layout {chosen.layout}; state and operands: {chosen.dtype}")
    if chosen.profile == "metal":
        for name, (why, where) in (REFUSED | REFUSED_DTYPES).items():
            print(f"  without {name}: {why} ({where})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
