"""``ds4server``: flags to a running server. Exit codes: 0 clean end, 1 the model cannot run, 2 configuration."""

import argparse
import logging
import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path

from waitress.server import create_server

from ds4ref.conversation import Conversation
from ds4ref.gguf import Artifact, ArtifactError
from ds4ref.model import Model
from ds4ref.progress import Progress
from ds4ref.reuse import Policy, Reuser

from . import backend as backends
from .app import Service, application
from .engine import Engine
from .plan import resolve

log = logging.getLogger("ds4server")
TOY = "ds4-tiny"
RESIDENT_BANKS = 2  # sequences kept for reuse: an agent's conversation and whatever it asks beside it
MAX_BODY = 64 << 20
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
PLAIN_FOLDERS = {"gguf", "models", "weights"}


class ConfigurationError(ValueError):
    """One sentence about a flag. Exit code 2."""


def parser():
    top = argparse.ArgumentParser(
        prog="ds4server",
        description="Serve a GGUF of a known family over HTTP (OpenAI chat completions). "
        "Without -m an embedded random toy is served, for trying the interface: its answers are noise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    top.add_argument("-m", "--model", metavar="FILE", help="GGUF; of a split artifact the first shard "
                     "(default: ds4flash.gguf in the working directory, else the embedded toy)")  # fmt: skip
    top.add_argument("--model-id", metavar="ID", help="advertised id (default: from the file name)")
    top.add_argument("-c", "--ctx", type=int, default=8192, help="tokens that a prompt and its answer may have together")
    top.add_argument("--host", default="127.0.0.1", help="listening address; 0.0.0.0 is every interface")
    top.add_argument("--port", type=int, default=8000, help="listening port; 0 takes a free one")
    top.add_argument("--backend", choices=backends.NAMES, default="auto",
                     help="auto: JAX where it runs this file, else the NumPy reference")  # fmt: skip
    top.add_argument("--prefix-reuse", choices=("off", "exact", "partial", "auto"), default="auto",
                     help="what of a prompt is taken from earlier requests: nothing, whole sequences, or also prefixes "
                     "of them; auto is partial")  # fmt: skip
    top.add_argument("-n", "--tokens", type=int, default=393216, help="output budget of a request that names none")
    top.add_argument("--cors", action="store_true", help="browser cross-origin headers")
    top.add_argument("--chdir", metavar="DIR", help="working directory, set before anything else is looked up")
    top.add_argument("--max-queue", type=int, default=64, help="requests that may wait")
    top.add_argument("--sse-keepalive-seconds", type=float, default=5.0, help="longest silence of a stream")
    top.add_argument("--grace-seconds", type=float, default=5.0, help="time a running answer gets at shutdown")
    top.add_argument("--ignore-eos", action="store_true", help="never let the model end an answer")
    top.add_argument("--ignore-eos-in-reasoning", action="store_true", help="nor inside an open reasoning block")
    top.add_argument("--version", action="version", version=f"ds4server {version('ds4')}")
    return top


def main(argv=None):
    """Entry point. Returns the exit code."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for quiet in ("waitress", "jax"):
        logging.getLogger(quiet).setLevel(logging.WARNING)
    try:
        with ExitStack() as stack:
            return _serve(args, stack)
    except (ConfigurationError, backends.BackendError, ArtifactError) as error:
        print(f"ds4server: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _serve(args, stack):
    _check(args)
    if args.chdir is not None:
        try:
            os.chdir(args.chdir)
        except OSError as error:
            raise ConfigurationError(f"--chdir {args.chdir}: {error.strerror}") from None
    path, toy = _model_path(args, stack)
    artifact = stack.enter_context(Artifact.open(path))
    backend = backends.choose(args.backend, artifact.architecture)
    context = args.ctx if args.ctx > 0 else None
    model = Model.from_artifact(artifact, context=context)
    plan = resolve(
        family=artifact.architecture, ctx=args.ctx, context_cap=model.context_cap, backend_requested=args.backend,
        backend=backend, prefix_reuse=args.prefix_reuse, resident_banks=RESIDENT_BANKS, toy=toy,
    )  # fmt: skip
    for issue in plan.issues:
        log.info("%s: %s (%s)", issue.level, issue.message, issue.code)
    if plan.errors:
        raise ConfigurationError(plan.errors[0].message)
    conversation = Conversation(artifact)
    if (args.ignore_eos or args.ignore_eos_in_reasoning) and not conversation.end_ids:
        raise ConfigurationError("--ignore-eos needs a tokenizer with an end token, and this file names none")
    if backend.name == "jax":
        model = _on_device(artifact, context)
    policy = Policy(plan.effective["prefix_reuse"])
    engine = Engine(model, Reuser(model.new_state, args.ctx, RESIDENT_BANKS, policy), args.max_queue)
    service = Service(
        engine=engine,
        conversation=conversation,
        plan=plan,
        model_id=args.model_id or (TOY if toy else model_id(path)),
        architecture=artifact.architecture,
        vocabulary=model.vocabulary,
        context=args.ctx,
        created=int(path.stat().st_mtime),
        toy=toy,
        default_budget=args.tokens,
        keepalive=args.sse_keepalive_seconds,
        ignore_eos=args.ignore_eos,
        ignore_eos_in_reasoning=args.ignore_eos_in_reasoning,
    )
    return _listen(args, service)


def _on_device(artifact, context):
    """The artifact's JAX model, loaded with a progress line."""
    from ds4jax.compilation import enable_cache
    from ds4jax.model import Model as DeviceModel

    enable_cache()
    with Progress("loading", sum(tensor.nbytes for tensor in artifact.tensors.values())) as progress:
        return DeviceModel(artifact, context=context, banks=RESIDENT_BANKS, did=lambda tensor: progress.advance(tensor.nbytes))


def _check(args):
    for flag, value, least in (
        ("--tokens", args.tokens, 0), ("--max-queue", args.max_queue, 0), ("--port", args.port, 0),
        ("--grace-seconds", args.grace_seconds, 0),
    ):  # fmt: skip
        if value < least:
            raise ConfigurationError(f"{flag} must be at least {least}, got {value}")
    if args.port > 65535:
        raise ConfigurationError(f"--port must be at most 65535, got {args.port}")
    if args.sse_keepalive_seconds <= 0:
        raise ConfigurationError(f"--sse-keepalive-seconds must be greater than 0, got {args.sse_keepalive_seconds:g}")


def _model_path(args, stack):
    """(path, whether it is the embedded toy)."""
    if args.model is not None:
        return Path(args.model), False
    default = Path("ds4flash.gguf")
    if default.exists():
        return default, False
    return stack.enter_context(as_file(files("ds4server") / "tiny.gguf")), True


def model_id(path):
    """The advertised id of a file: its stem without the shard suffix, or the folder's name where folders name models."""
    folder = path.absolute().parent.name
    if "Mixed-Quant" in folder or (folder.upper().endswith("GGUF") and folder.lower() not in PLAIN_FOLDERS):
        return folder
    return SHARD.sub("", path.name.removesuffix(".gguf"))


def _listen(args, service):
    # A thread is held per request in flight: the running one, the queue, and some for what never waits.
    threads = args.max_queue + 16
    try:
        server = create_server(
            application(service, args.cors),
            host=args.host,
            port=args.port,
            threads=threads,
            connection_limit=threads + 64,
            channel_request_lookahead=1,
            max_request_body_size=MAX_BODY + 1,
            outbuf_high_watermark=1 << 20,
            ident="ds4server",
            clear_untrusted_proxy_headers=True,
        )
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(f"--host {args.host} is no address of this machine") from None
    service.engine.start()
    interrupt = _Interrupt(service.engine, args.grace_seconds)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    log.info("%s: %s on the %s backend, context %d", service.model_id, service.architecture,
             service.plan.effective["backend"], service.context)  # fmt: skip
    log.info("listening on http://%s:%s", args.host, server.effective_port)
    try:
        server.run()  # returns on KeyboardInterrupt
    finally:
        service.engine.stop(0)
        server.close()
    return 0


class _Interrupt:
    """Signal handler: the first signal lets running answers end while the server still delivers, the next one leaves."""

    FLUSH = 0.3  # seconds in which the last events reach the clients

    def __init__(self, engine, grace):
        self._engine, self._grace = engine, grace
        self._asked = False

    def __call__(self, *_):
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        log.info("stopping")
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self):
        self._engine.stop(self._grace)
        time.sleep(self.FLUSH)
        os.kill(os.getpid(), signal.SIGINT)
