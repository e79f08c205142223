"""What the operator asked for: command line over environment over defaults, read into one :class:`Request`.

Pure: looks at no file, no host and no model. A flag that cannot be read is a :class:`UsageError`, one sentence; a variable
that cannot be read is ignored, and the request says so (``Request.ignored``). Knows nothing about families.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from types import MappingProxyType

CTX = 8192
SCHED_CHUNK, LIVE_CHUNK, BATCHED_LIVE_CHUNK = 4096, 512, 128
FLOOR_GB = 4
DISK_MB = 4096
OUTPUT_BUDGET = 393216
MAX_WIDTH = 64
LARGEST = 2**31 - 1
BACKENDS = ("auto", "jax", "numpy", "cuda", "metal", "cpu", "reference")
REUSES = ("off", "exact", "partial", "auto")
MODES = ("off", "auto", "on")
SCOPES = ("base", "mtp", "both")

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_C_NUMBER = re.compile(r"\s*([+-]?)([0-9]+)", re.ASCII)
_FAST_MATH = re.compile(r"--xla_[cg]pu_enable_fast_math(=(true|1))?(?!\S)")
_SPACE = re.compile(r"([0-9]{1,18})\s*([a-z]*)", re.ASCII)
_UNITS = {"": 0, "m": 0, "mb": 0, "mi": 0, "mib": 0, "k": -1, "kb": -1, "ki": -1, "kib": -1,
          "g": 1, "gb": 1, "gi": 1, "gib": 1, "t": 2, "tb": 2, "ti": 2, "tib": 2}  # fmt: skip


class UsageError(Exception):
    """One sentence about the command line. Exit code 2."""


@dataclass(frozen=True)
class FitReserves:
    """Variables that shape the floor of the memory quote, in MiB; None where unset."""

    batch: int | None = None
    derived: bool = True
    burst: int = 2048
    serial: int = 1024


@dataclass(frozen=True)
class Request:
    """Everything section 2 of the contract lets an operator say, after precedence. None means "not said".

    width: "auto", "off" or a number, which is then a *named* width; fence: whether chunks are held to 8,192 and the verified
    set; fixed_live: the live chunk that is taken as given; native: of ``--native-chunk`` or its variable; the family's own
    variable is looked up in ``environment``, which holds the ``DS4_*`` variables, when the family is known.
    """

    model: str | None = None
    model_id: str | None = None
    vision: str | None = None
    mtp: str | None = None
    mtp_mode: str = "auto"
    mtp_draft: int | None = None
    mtp_margin: float = 3.0
    ctx: int = CTX
    width: int | str = "auto"
    batched: bool = False
    serial_lane: bool = False
    reuse: str = "auto"
    partial_min: int = 192
    sched_chunk: int | None = None
    live_chunk: int | None = None
    fixed_live: int | None = None
    fence: bool = True
    native_chunk: int | None = None
    floor_gb: int = FLOOR_GB
    disk_dir: str | None = None
    disk_mb: int = DISK_MB
    disk_min: int = 512
    disk_cold_max: int = 30000
    disk_continued: int = 10000
    disk_trim: int = 32
    disk_align: int = 2048
    disk_same_quant: bool = False
    disk_partial: bool = True
    bank_checkpoint: bool = True
    persist_min: int = 8192
    pin_min: int = 65536
    eos_policy: str = "model"
    print_plan: bool = False
    check: bool = False
    expect_plan: str | None = None
    backend: str = "auto"
    """The word as given: one of ``BACKENDS``."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    cors: bool = False
    api_key: str | None = field(default=None, repr=False)
    tokens: int = OUTPUT_BUDGET
    threads: int | None = None
    chdir: str | None = None
    trace: str | None = None
    tool_ids: int = 100000
    exact_tool_replay: bool = True
    max_queue: int | None = 64
    """None: no bound."""
    max_clients: int | None = 256
    max_queue_bytes: int | None = 256 << 20
    max_queue_age: float | None = 600.0
    coalesce_wait_ms: int = 0
    disconnect_abort: bool = True
    serial_surfaces: frozenset = frozenset()
    default_temperature: float | None = None
    max_body_mb: int = 64
    keepalive: float = 5.0
    grace: float = 5.0
    strict_model: bool = False
    model_catalog: str | None = None
    quality: bool = False
    warm_weights: bool = False
    ssd_streaming: bool = False
    ssd_options: bool = False
    dspark: str | None = None
    dspark_trials: bool = True
    manifest: str | None = None
    manifest_scope: str = "both"
    manifest_drafter: bool = True
    reserves: FitReserves = FitReserves()
    ignored: tuple[str, ...] = ()
    environment: Mapping = field(default_factory=lambda: MappingProxyType({}))

    @property
    def named_width(self):
        """The width that was named, or None."""
        return self.width if isinstance(self.width, int) else None

    @property
    def requested_backend(self):
        """The plan's word: ``numpy`` is the reference, ``jax`` is ``auto`` without the fallback."""
        return {"numpy": "reference", "jax": "auto"}.get(self.backend, self.backend)


def read(argv, environ):
    """The :class:`Request` of a command line (without the program name) and an environment (name → text).

    UsageError for a flag that cannot be read; SystemExit(0), after printing, for ``--help`` and ``--version``.
    """
    args = vars(parser().parse_args(list(argv)))
    flags = {name: value for name, value in args.items() if value is not None}
    _check_together(flags)
    if "quality" in flags and (fast := _FAST_MATH.search(environ.get("XLA_FLAGS", ""))):
        raise UsageError(f"--quality and {fast[0]} in XLA_FLAGS, which allows approximations, exclude each other; drop one")
    said = _environment(environ)
    fields = said.fields | {name: value for name, value in flags.items() if name not in _DERIVED}
    width = flags.get("width")
    if (banks := flags.get("batched")) is not None:
        if width not in (None, banks):
            raise UsageError(f"--batched-session {banks} and --max-seqs {_shown(width)} differ; name one width")
        width = banks
        fields["batched"] = True
    if width is not None:
        fields["width"] = width
    if "quantum" in flags:
        fields["fixed_live"] = flags["quantum"]
    elif "batched" in flags and fields.get("live_chunk") is None:
        fields["fixed_live"] = BATCHED_LIVE_CHUNK
    if flags.get("ignore_eos"):
        fields["eos_policy"] = "global"
    elif flags.get("ignore_eos_in_reasoning"):
        fields["eos_policy"] = "reasoning"
    fields["ssd_options"] = bool({"ssd_cold", "ssd_cache"} & flags.keys())
    fields["ignored"] = tuple(said.ignored)
    fields["environment"] = MappingProxyType({k: v for k, v in environ.items() if k.startswith("DS4_")})
    return Request(**fields)


_DERIVED = {"batched", "quantum", "ignore_eos", "ignore_eos_in_reasoning", "ssd_cold", "ssd_cache", "width"}


def _shown(width):
    return "0" if width == "off" else width


def _check_together(flags):
    """What only two flags together make wrong."""
    if "model" not in flags:
        for name, flag in (("mtp", "--mtp"), ("ignore_eos", "--ignore-eos"),
                           ("ignore_eos_in_reasoning", "--ignore-eos-in-reasoning")):  # fmt: skip
            if name in flags:
                raise UsageError(f"{flag} needs -m, and no model is named")
    if "quantum" in flags and "live_chunk" in flags:
        raise UsageError("--mixed-prefill-quantum and --prefill-chunk-live set the same chunk; name one of them")
    least = flags.get("disk_min", Request.disk_min)
    most = flags.get("disk_cold_max", Request.disk_cold_max)
    if 0 < most < least:
        raise UsageError(
            f"--kv-cache-cold-max-tokens is {most}, below --kv-cache-min-tokens {least}; 0 or at least {least} is accepted"
        )


# The command line.


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message.removeprefix("argument "))


def _integer(flag, lo=None, hi=LARGEST):
    wanted = "an integer" if lo is None else f"an integer from {lo} to {hi}"

    def convert(text):
        if not _INTEGER.fullmatch(text):
            raise UsageError(f"{flag} must be {wanted}, got {text!r}")
        value = int(text)
        least = -LARGEST if lo is None else lo
        if value < least:
            raise UsageError(f"{flag} must be at least {least}, got {value}")
        if value > hi:
            raise UsageError(f"{flag} must be at most {hi}, got {value}")
        return value

    return convert


def _real(flag, above=None, lo=None, hi=None):
    wanted = f"greater than {above:g}" if above is not None else f"at least {lo:g}" if hi is None else f"from {lo:g} to {hi:g}"

    def convert(text):
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{flag} must be a number {wanted}, got {text!r}") from None
        good = value > above if above is not None else value >= lo
        if not good or (hi is not None and value > hi) or value == float("inf"):
            raise UsageError(f"{flag} must be {wanted}, got {text}")
        return value

    return convert


def _width(flag, zero=False):
    def convert(text):
        width = _width_of(text, zero)
        if width is None:
            raise UsageError(f"{flag} must be {'0, ' if zero else ''}1 to {MAX_WIDTH} or auto, got {text!r}")
        return width

    return convert


def _width_of(text, zero=True):
    """A width: auto, off or 1 … 64; None for anything else."""
    if text == "auto":
        return text
    if not _INTEGER.fullmatch(text):
        return None
    value = int(text)
    if value == 0 and zero:
        return "off"
    return value if 1 <= value <= MAX_WIDTH else None


def _word(flag, words):
    def convert(text):
        if text not in words:
            raise UsageError(f"{flag} must be one of {', '.join(words)}, got {text!r}")
        return text

    return convert


def disk_space(text, flag="--kv-disk-space"):
    """A disk budget in MiB: an integer with an optional unit (k, m, g, t; also …b, …i, …ib), MiB without one."""
    found = _SPACE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise UsageError(f"{flag} must be an integer with an optional unit k, m, g or t (…b, …ib), got {text!r}")
    count, power = int(found[1]), _UNITS[found[2]]
    mib = -(-count // 1024) if power < 0 else count * 1024**power
    if not 1 <= mib <= LARGEST:
        raise UsageError(f"{flag} must be 1 to {LARGEST} MiB, got {text!r}")
    return mib


class _Once(argparse.Action):
    def __call__(self, parser, namespace, value, option_string=None):
        if getattr(namespace, self.dest) is not None:
            raise UsageError(f"{option_string} may be given once, and a second file {value!r} was found")
        setattr(namespace, self.dest, value)


def parser():
    """The command line of ``ds4server``. Every default is None, so that what was said can be told from what was not."""
    top = _Parser(
        prog="ds4server",
        usage="ds4server [-m FILE] [options]",
        description="Serve a GGUF of a known family over HTTP. Without -m, and without a ds4flash.gguf in the working "
        "directory, a toy inside the package is served, for trying the interface: it knows one book.",
        allow_abbrev=False,
        argument_default=None,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=112),
    )
    _model_flags(top.add_argument_group("model"))
    _plan_flags(top.add_argument_group("plan"))
    _disk_flags(top.add_argument_group("disk store"))
    _server_flags(top.add_argument_group("server"))
    top.add_argument("--version", action="version", version=f"ds4server {version('ds4')}", default=argparse.SUPPRESS)
    return top


def _switch(group, flag, dest, help):
    group.add_argument(flag, dest=dest, action="store_const", const=True, help=f"{help} (default: off)")


def _model_flags(group):
    add = group.add_argument
    add("-m", "--model", metavar="FILE", help="GGUF; of a split artifact the first shard "
        "(default: ds4flash.gguf in the working directory, else the embedded toy)")  # fmt: skip
    add("--model-id", metavar="ID", help="advertised id (default: from the file name)")
    add("--vision", metavar="FILE", help="image encoder of the same family (default: none)")
    add("--mtp", metavar="PATH", help="draft sidecar; needs -m (default: none)")
    add("--mtp-mode", metavar="WORD", type=_word("--mtp-mode", MODES), help="speculation: off, auto or on (default: auto)")
    add("--mtp-draft", metavar="N", type=_integer("--mtp-draft", 1), help="draft length (default: the family's minimum)")
    add("--mtp-margin", metavar="F", type=_real("--mtp-margin", lo=0, hi=1000),
        help="draft confidence needed to go on drafting (default: 3)")  # fmt: skip
    _switch(group, "--ignore-eos", "ignore_eos", "never let the model end an answer; needs -m")
    _switch(group, "--ignore-eos-in-reasoning", "ignore_eos_in_reasoning", "nor inside an open reasoning block; needs -m")
    _switch(group, "--quality", "quality", "float32 operands and sums only, also where a platform's default is less")
    _switch(group, "--warm-weights", "warm_weights", "read every weight page before listening")
    _switch(group, "--ssd-streaming", "ssd_streaming", "expert streaming, which is refused: it is not implemented")
    _switch(group, "--ssd-streaming-cold", "ssd_cold", "an option of it, refused alike")
    add("--ssd-streaming-cache-experts", dest="ssd_cache", metavar="N", help="an option of it, refused alike (default: none)")


def _plan_flags(group):
    add = group.add_argument
    add("-c", "--ctx", metavar="N", type=_integer("--ctx"),
        help=f"tokens that a prompt and its answer may have together (default: {CTX})")  # fmt: skip
    add("--max-seqs", dest="width", metavar="N|auto", type=_width("--max-seqs"),
        help="sequences served at once, 1 to 64 (default: auto, by family and memory)")  # fmt: skip
    add("--cont-width", dest="width", metavar="N|auto", type=_width("--cont-width", zero=True),
        help="older name of --max-seqs; 0: no banks at all")  # fmt: skip
    add("--batched-session", dest="batched", metavar="N", type=_integer("--batched-session", 1, MAX_WIDTH),
        help=f"--max-seqs N without speculation, with a live chunk of {BATCHED_LIVE_CHUNK} tokens (default: off)")  # fmt: skip
    add("--prefix-reuse", dest="reuse", metavar="WORD", type=_word("--prefix-reuse", REUSES),
        help="what of a prompt is taken from earlier requests: off; exact, whole sequences; partial, prefixes of them too; "
        "auto, the best that is qualified (default: auto)")  # fmt: skip
    add("--prefill-chunk", dest="sched_chunk", metavar="N", type=_integer("--prefill-chunk", 1),
        help=f"prompt tokens between two looks at the queue (default: {SCHED_CHUNK})")  # fmt: skip
    add("--prefill-chunk-live", dest="live_chunk", metavar="N", type=_integer("--prefill-chunk-live", 1),
        help=f"the same while another sequence is answered (default: {LIVE_CHUNK})")  # fmt: skip
    add("--mixed-prefill-quantum", dest="quantum", metavar="N", type=_integer("--mixed-prefill-quantum", 1),
        help=f"live chunk taken as given, for tests (default: none; {BATCHED_LIVE_CHUNK} with --batched-session)")  # fmt: skip
    add("--native-chunk", metavar="N", type=_integer("--native-chunk", 1),
        help="rows of one forward pass (default: the family's variable, else the family's default)")  # fmt: skip
    add("--mem-floor-gb", dest="floor_gb", metavar="N", type=_integer("--mem-floor-gb", 0),
        help=f"host memory that stays free, GiB (default: {FLOOR_GB})")  # fmt: skip
    backend = _word("--backend", BACKENDS)
    add("--backend", metavar="NAME", type=backend, help="auto: the best JAX platform present (cuda, metal, cpu), else "
        "the NumPy reference; jax: the same, or an error; cuda, metal, cpu; reference or numpy (default: auto)")  # fmt: skip
    for name in ("cuda", "metal", "cpu"):
        add(f"--{name}", dest="backend", action="store_const", const=name, help=f"--backend {name}")
    add("--tensor-parallel", metavar="N", type=_integer("--tensor-parallel", 1), help="slices of every layer (default: 1)")
    add("--pipeline-parallel", metavar="N", type=_integer("--pipeline-parallel", 1), help="slices of the layers (default: 1)")
    _switch(group, "--print-plan", "print_plan", "print the plan that will be served, as JSON, and go on")
    _switch(group, "--check-config", "check", "print the plan, as JSON, and exit: 0 when it may serve, else 2")
    add("--expect-plan", metavar="FILE", action=_Once, help="serve only the plan that this JSON file holds (default: none)")


def _disk_flags(group):
    add = group.add_argument
    add("--kv-disk-dir", dest="disk_dir", metavar="DIR", help="keep prefixes on disk here (default: none, no disk)")
    add("--kv-disk-space-mb", dest="disk_mb", metavar="N", type=_integer("--kv-disk-space-mb", 1),
        help=f"disk budget in MiB (default: {DISK_MB})")  # fmt: skip
    add("--kv-disk-space", dest="disk_mb", metavar="S", type=disk_space,
        help="the same with a unit: 512M, 32G, 2TiB; MiB without one")  # fmt: skip
    for flag, dest, least, text in (
        ("--kv-cache-min-tokens", "disk_min", 1, "shortest prefix written or read"),
        ("--kv-cache-cold-max-tokens", "disk_cold_max", 0, "longest prompt saved as cold; 0: none"),
        ("--kv-cache-continued-interval-tokens", "disk_continued", 0, "spacing of continued saves; 0: none"),
        ("--kv-cache-boundary-trim-tokens", "disk_trim", 0, "tail that a cold save leaves out"),
        ("--kv-cache-boundary-align-tokens", "disk_align", 0, "multiple that saves align to; 0: none"),
    ):
        default = getattr(Request, dest)
        add(flag, dest=dest, metavar="N", type=_integer(flag, least), help=f"{text} (default: {default})")
    _switch(group, "--kv-cache-reject-different-quant", "disk_same_quant", "records of the same quantization only")


def _key(text):
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError("--api-key must be printable ASCII without spaces, and not empty")
    return text


def _server_flags(group):
    add = group.add_argument
    add("--host", metavar="ADDRESS", help="listening address; 0.0.0.0 is every interface (default: 127.0.0.1)")
    add("--port", metavar="N", type=_integer("--port", 0, 65535), help="listening port; 0 takes a free one (default: 8000)")
    _switch(group, "--cors", "cors", "browser cross-origin headers")
    add("--api-key", metavar="KEY", type=_key, help="what a client must send as bearer token or x-api-key; "
        "DS4_SERVER_API_KEY keeps it out of the process list (default: none)")  # fmt: skip
    add("-n", "--tokens", metavar="N", type=_integer("--tokens", 0),
        help=f"output budget of a request that names none (default: {OUTPUT_BUDGET})")  # fmt: skip
    add("-t", "--threads", metavar="N", type=_integer("--threads", 1), help="host threads (default: the libraries' own)")
    add("--chdir", metavar="DIR", help="working directory, set before anything else is looked up (default: stay)")
    add("--trace", metavar="FILE", help="readable trace of every request; it holds private text (default: none)")
    add("--tool-memory-max-ids", dest="tool_ids", metavar="N", type=_integer("--tool-memory-max-ids", 1),
        help=f"bound of the tool replay map (default: {Request.tool_ids})")  # fmt: skip
    group.add_argument("--disable-exact-dsml-tool-replay", dest="exact_tool_replay", action="store_const", const=False,
                       help="canonical rendering of tool calls only (default: off)")  # fmt: skip
    add("--max-queue", metavar="N", type=_integer("--max-queue", 0), help="requests that may wait (default: 64)")
    add("--max-body-mb", metavar="N", type=_integer("--max-body-mb", 1, 4096), help="longest request body, MiB (default: 64)")
    add("--sse-keepalive-seconds", dest="keepalive", metavar="F", type=_real("--sse-keepalive-seconds", above=0),
        help="longest silence of a stream (default: 5)")  # fmt: skip
    add("--grace-seconds", dest="grace", metavar="F", type=_real("--grace-seconds", lo=0),
        help="time a running answer gets at shutdown (default: 5)")  # fmt: skip
    _switch(group, "--strict-model", "strict_model", "refuse requests that name another model")
    add("--model-catalog", metavar="FILE", help="JSON whose models are listed in GET /v1/models too (default: none)")
    group.add_argument("--no-update-check", action="store_const", const=None, help="accepted; there is no update check")


# The environment.


def c_number(text):
    """A C-style number: optional blanks, optional sign, digits, the rest ignored; no digits are 0."""
    found = _C_NUMBER.match(text)
    if found is None:
        return 0
    value = int(found[2][:19])
    return -value if found[1] == "-" else value


def reserve(text):
    """A C-style number of MiB, or None where the text counts as unset: empty, or negative other than −0."""
    if not text.strip():
        return None
    value = c_number(text)
    return None if value < 0 else value


@dataclass
class _Said:
    fields: dict = field(default_factory=dict)
    ignored: list = field(default_factory=list)


def _environment(environ):
    """The fields of the request that variables set, and a sentence for every variable that cannot be read."""
    said = _Said()
    fields, get = said.fields, environ.get

    def ignore(name, accepted):
        said.ignored.append(f"{name} is ignored: it holds {get(name)!r}; {accepted} is accepted")

    def count(name, dest, least=0, unbounded=False):
        """An integer of at least ``least``; 0 removes a bound where there is one."""
        text = get(name)
        if text is None:
            return
        if not _INTEGER.fullmatch(text.strip()) or int(text) < least:
            ignore(name, f"an integer of at least {least}")
        else:
            fields[dest] = None if unbounded and int(text) == 0 else int(text)

    def natural(name, dest, least=0):
        """A C-style number of at least ``least``."""
        if (text := get(name)) is not None:
            if c_number(text) < least:
                ignore(name, f"a number of at least {least}")
            else:
                fields[dest] = c_number(text)

    if (text := get("DS4_SERVER_COALESCE_MAX")) is not None:
        width = _width_of(text.strip())
        if width is None:
            ignore("DS4_SERVER_COALESCE_MAX", f"0, 1 to {MAX_WIDTH} or auto")
        else:
            fields["width"] = width
    fields["serial_lane"] = get("DS4_SERVER_CONTINUOUS") == "0"
    if get("DS4_SERVER_FORK") == "0":
        fields["reuse"] = "off"
    elif (text := get("DS4_SERVER_FORK_PARTIAL")) in ("0", "1"):
        fields["reuse"] = "partial" if text == "1" else "exact"
    count("DS4_SERVER_FORK_PARTIAL_MIN", "partial_min")
    if "partial_min" in fields:
        fields["partial_min"] = max(136, fields["partial_min"])
    fields["disk_partial"] = get("DS4_SERVER_DISK_PARTIAL") != "0"
    fields["bank_checkpoint"] = get("DS4_SERVER_BANK_CHECKPOINT") != "0"
    if "DS4_MTP_SPEC_DISABLE" in environ:
        fields["mtp_mode"] = "off"
    natural("DS4_MEM_FLOOR_GB", "floor_gb")
    for name, dest in (("DS4_SERVER_PERSIST_MIN_TOKENS", "persist_min"), ("DS4_SERVER_PIN_MIN_TOKENS", "pin_min")):
        if name in environ:
            fields[dest] = max(0, c_number(environ[name]))
    natural("DS4_CONT_PREFILL_CHUNK", "sched_chunk")
    natural("DS4_CONT_PREFILL_CHUNK_LIVE", "live_chunk")
    fields["fence"] = get("DS4_CONT_PREFILL_NOFENCE") != "1"
    natural("DS4_NATIVE_PREFILL_CHUNK", "native_chunk", least=1)
    fields["reserves"] = _reserves(get)
    fields["dspark"] = get("DS4_DSPARK_MODEL") or None
    fields["dspark_trials"] = get("DS4_CONT_DSPARK") != "0"
    fields["manifest"] = get("DS4_CUDA_WEIGHT_IPC_MANIFEST") or None
    if (text := get("DS4_CUDA_WEIGHT_IPC_SCOPE")) is not None:
        if text in SCOPES:
            fields["manifest_scope"] = text
        else:
            ignore("DS4_CUDA_WEIGHT_IPC_SCOPE", "base, mtp or both")
    fields["manifest_drafter"] = not c_number(get("DS4_CUDA_WEIGHT_IPC_NO_DRAFTER", "0"))
    count("DS4_SERVER_MAX_CLIENTS", "max_clients", unbounded=True)
    count("DS4_SERVER_MAX_QUEUE", "max_queue", unbounded=True)
    count("DS4_SERVER_MAX_QUEUE_BYTES", "max_queue_bytes", unbounded=True)
    count("DS4_SERVER_MAX_QUEUE_AGE_S", "max_queue_age", unbounded=True)
    count("DS4_SERVER_COALESCE_WAIT_MS", "coalesce_wait_ms")
    if key := get("DS4_SERVER_API_KEY"):
        fields["api_key"] = key
    fields["disconnect_abort"] = get("DS4_SERVER_DISCONNECT_ABORT") != "0"
    surfaces = (("DS4_SERVER_CONT_ANTHROPIC", "anthropic"), ("DS4_SERVER_CONT_RESPONSES", "responses"))
    fields["serial_surfaces"] = frozenset(surface for name, surface in surfaces if get(name) == "0")
    if (text := get("DS4_SERVER_DEFAULT_TEMP")) is not None:
        try:
            fields["default_temperature"] = _real("", lo=0, hi=100)(text)
        except UsageError:
            ignore("DS4_SERVER_DEFAULT_TEMP", "a number from 0 to 100")
    return said


def _reserves(get):
    """The variables of section 7.3. What cannot be a reserve counts as unset."""
    batch, burst, serial = (
        reserve(get(name, ""))
        for name in ("DS4_BATCH_FIT_HEADROOM_MB", "DS4_BATCH_FIT_BURST_MB", "DS4_SESSION_GRAPH_HEADROOM_MB")
    )
    default = FitReserves()
    fits = reserve(get("DS4_SESSION_GRAPH_FIT", ""))
    return FitReserves(
        batch=batch,
        derived=reserve(get("DS4_BATCH_FIT_HEADROOM_DERIVED", "")) != 0,
        burst=default.burst if burst is None else burst,
        serial=0 if fits == 0 else default.serial if serial is None else serial,
    )


def written(request, plan, native_variable=None):
    """The variables to set (text) and to remove (None) so that a child process resolves to the plan's effective view.

    native_variable: the family's own name for the native chunk. A live chunk that ``--batched-session`` implies is not
    written: as a variable it would be held to the verified set.
    """
    effective = plan.effective
    lane_off = request.width == "off" or (effective["max_seqs"] == 1 and not effective["bank_driver"])
    reuse = {"off": ("0", "0"), "exact": ("1", "0"), "partial": ("1", "1")}[effective["prefix_reuse"]]
    native = effective["native_chunk"]
    implied = request.batched and request.fixed_live == BATCHED_LIVE_CHUNK and request.live_chunk is None
    variables = {
        "DS4_MEM_FLOOR_GB": str(effective["mem_floor_gb"]),
        "DS4_SERVER_COALESCE_MAX": "0" if lane_off else str(effective["max_seqs"]),
        "DS4_SERVER_FORK": reuse[0],
        "DS4_SERVER_FORK_PARTIAL": reuse[1],
        "DS4_CONT_PREFILL_CHUNK": str(effective["sched_chunk"]),
        "DS4_CONT_PREFILL_CHUNK_LIVE": None if implied else str(effective["sched_chunk_live"]),
        "DS4_NATIVE_PREFILL_CHUNK": None if native is None else str(native),
        "DS4_MTP_SPEC_DISABLE": "1" if effective["mtp_mode"] == "off" else None,
    }
    if native_variable is not None:
        variables[native_variable] = None if native is None else str(native)
    return variables
