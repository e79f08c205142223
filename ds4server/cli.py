"""``ds4server``: a command line to a running server.

Exit codes: 0 clean end, or a configuration that ``--check-config`` approves; 2 a command line, plan or expectation that is
refused; 1 a model, address or device that fails to open. Nothing heavy is imported before the command line is read.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path

from . import expected, options, report
from .options import UsageError
from .plan import resolve

log = logging.getLogger("ds4server")
TOY = "ds4-tiny"
SPARE = 64  # connections for those who are refused or only look
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
PLAIN_FOLDERS = {"gguf", "models", "weights"}
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NPROC")


class StartError(RuntimeError):
    """The process cannot serve: one sentence. Exit code 1."""


def main(argv=None):
    """Entry point. Returns the exit code."""
    try:
        request = options.read(sys.argv[1:] if argv is None else argv, os.environ)
        _prepare(request)
    except UsageError as error:
        return _fail(error, 2)
    from ds4ref.gguf import ArtifactError

    from .backend import BackendError
    from .owner.manifest import OwnerError

    try:
        with ExitStack() as stack:
            return _run(request, stack)
    except (UsageError, BackendError) as error:
        return _fail(error, 2)
    except (StartError, ArtifactError, OwnerError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 0


def _fail(error, code):
    print(f"ds4server: {error}", file=sys.stderr)
    return code


def _prepare(request):
    """The process's surroundings, before anything that looks at them is imported."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for quiet in ("waitress", "jax"):
        logging.getLogger(quiet).setLevel(logging.WARNING)
    if request.chdir is not None:
        try:
            os.chdir(request.chdir)
        except OSError as error:
            raise UsageError(f"--chdir {request.chdir}: {error.strerror}") from None
    if request.threads is not None:
        os.environ |= dict.fromkeys(THREAD_VARIABLES, str(request.threads))


def _run(request, stack):
    """Resolve, check, open, resolve again, listen."""
    from . import evidence

    wanted = None if request.expect_plan is None else expected.load(request.expect_plan)
    catalog = _catalog(request.model_catalog)
    path, toy = _model_path(request, stack)
    found = evidence.before_open(request, path, toy)
    plan = resolve(request, found.row, found.facts)
    if request.check:
        _show(plan)
        _expect(wanted, plan, opened=False)
        return 2 if plan.errors else 0
    if plan.errors:
        return _refuse(request, plan)
    for issue in plan.issues:
        log.info("%s", report.line(issue))
    if found.failure is not None:
        raise StartError(found.failure)
    _expect(wanted, plan, opened=False)
    for name, value in options.written(request, plan, found.row.native_prefill.env).items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    service, facts = _open(request, found, plan, path, toy, _trace(request, stack))
    plan = resolve(request, found.row, facts)
    if plan.errors:
        return _refuse(request, plan)
    _expect(wanted, plan, opened=True)
    if request.print_plan:
        _show(plan)
    service.plan, service.catalog = plan, catalog
    return _listen(request, service)


def _show(plan):
    """The plan as JSON on stdout and as a report on stderr."""
    print(json.dumps(plan.as_json()), flush=True)
    print(*report.lines(plan), sep="\n", file=sys.stderr)


def _refuse(request, plan):
    if request.print_plan:
        print(json.dumps(plan.as_json()), flush=True)
    print(*report.lines(plan), sep="\n", file=sys.stderr)
    return _fail(plan.errors[0].message, 2)


def _expect(wanted, plan, opened):
    if wanted is not None and (sentence := expected.difference(wanted, plan, opened)) is not None:
        raise UsageError(sentence)


def _model_path(request, stack):
    """(path, whether it is the embedded toy)."""
    if request.model is not None:
        return Path(request.model), False
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


def _trace(request, stack):
    """The open :class:`trace.Trace`, closed with ``stack``, or None where none was asked for."""
    from .trace import Trace, TraceError

    if request.trace is None:
        return None
    try:
        trace = Trace.open(request.trace)
    except TraceError as error:
        raise UsageError(str(error)) from None
    stack.callback(trace.close)
    return trace


def _open(request, found, plan, path, toy, trace):
    """(the service on an opened engine, the facts that the engine adds)."""
    from ds4ref.conversation import Conversation
    from ds4ref.model import Model
    from ds4ref.reuse import Policy, Reuser

    from . import assembly, evidence
    from .app import Service
    from .engine import Engine
    from .identity import IdentityError
    from .kvstore import StoreError
    from .metrics import Durations
    from .owner import worker

    durations = Durations()
    observers = [durations.add, *([] if trace is None else [trace.add])]
    try:
        watch = assembly.Watch(found) if plan.effective["disk"] else None
    except IdentityError as error:
        raise UsageError(str(error)) from None
    artifact = worker.shared(request, found.artifact) or found.artifact
    if request.warm_weights:
        _warm(artifact)
    count = assembly.slots(plan)
    if plan.effective["backend"] == "reference":
        model, layout, dtype = Model.from_artifact(artifact, context=request.ctx), "file", "float32"
    else:
        model, layout, dtype = _on_device(artifact, request, plan, count)
        count = model.banks
    layout = shown_layout(request, layout)
    loaded = found.drafter.load(request, model) if plan.effective["mtp_weights"] else None
    conversation = Conversation(artifact)
    policy = Policy(plan.effective["prefix_reuse"], request.partial_min, pin=request.pin_min)
    reuser = Reuser(model.new_state, request.ctx, count, policy)
    facts = evidence.after_open(found, model, reuser, layout, plan.effective["max_seqs"], loaded)
    plan = resolve(request, found.row, facts)
    digest = None
    if watch is not None:
        digest, changed = watch.digest(assembly.settings(plan, dtype))
        if changed is not None:
            raise UsageError(f"the disk store is not opened: {changed}")
    try:
        keeper = assembly.keeper(request, plan, found.row, model, reuser, conversation.tokenizer, digest)
    except StoreError as error:
        raise UsageError(str(error)) from None
    if facts.native_chunk is not None:  # a yield of the scheduler, never more than a forward pass takes
        model.chunk = min(model.chunk, plan.effective["sched_chunk"] or model.chunk)
    engine = Engine(
        model, reuser, keeper=keeper, ended=lambda job: [tell(job) for tell in observers],
        **assembly.engine_options(request, plan, found.row, model, count, loaded),
    )  # fmt: skip
    service = Service(
        engine=engine,
        durations=durations,
        conversation=conversation,
        plan=plan,
        model_id=request.model_id or (TOY if toy else model_id(path)),
        architecture=artifact.architecture,
        vocabulary=model.vocabulary,
        context=request.ctx,
        created=int(path.stat().st_mtime),
        toy=toy,
        default_budget=request.tokens,
        keepalive=request.keepalive,
        ignore_eos=request.eos_policy == "global",
        ignore_eos_in_reasoning=request.eos_policy == "reasoning",
        disconnect_abort=request.disconnect_abort,
        default_temperature=1.0 if request.default_temperature is None else request.default_temperature,
        strict_model=request.strict_model,
        tools=assembly.tool_memory(request, keeper.store, conversation),
    )
    return service, facts


def shown_layout(request, layout):
    """A layout of the weights as the plan reports it."""
    return f"{layout}, exact float32" if request.quality else layout


def _catalog(path):
    """The ``models`` array of a JSON file, or None where no file is named."""
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--model-catalog {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--model-catalog {path}: the file is not JSON in UTF-8") from None
    models = found.get("models") if isinstance(found, dict) else None
    if not isinstance(models, list):
        raise UsageError(f"--model-catalog {path}: the file must hold an object whose models is an array")
    return models


def _unbounded(bound):
    """A bound, or one that no process reaches in place of None."""
    return sys.maxsize if bound is None else bound


def _on_device(artifact, request, plan, count):
    """(the artifact's JAX model with ``count`` banks or as many as the device holds, its weight layout, its dtype), loaded with
    a progress line."""
    import jax

    from ds4jax import platforms
    from ds4jax.compilation import enable_cache
    from ds4jax.model import Model
    from ds4ref.progress import Progress

    if plan.effective["backend"] == "cpu":
        jax.config.update("jax_platforms", "cpu")  # or arrays would go to the accelerator that was declined
    try:
        platform = platforms.choose(plan.effective["backend"])
    except platforms.PlatformError as error:
        raise StartError(str(error)) from None
    enable_cache()
    if request.quality:
        platforms.exact()
    dtype = "float32" if request.quality else platform.dtype
    try:
        with Progress("loading", sum(tensor.nbytes for tensor in artifact.tensors.values())) as progress:
            model = Model(
                artifact,
                context=request.ctx,
                banks=count,
                fewest=1,
                dtype=dtype,
                layout=platform.layout,
                chunk=plan.effective["native_chunk"],
                did=lambda tensor: progress.advance(tensor.nbytes),
            )
    except jax.errors.JaxRuntimeError as error:
        why = (str(error).splitlines() or ["no reason is given"])[0]
        raise StartError(f"{artifact.path.name} cannot be loaded on {platform.name}: {why}") from None
    return model, model.weights_layout, dtype


def _warm(artifact):
    """Read a byte of every page of the weights."""
    from ds4ref.progress import Progress

    with Progress("reading", sum(tensor.nbytes for tensor in artifact.tensors.values())) as progress:
        for tensor in artifact.tensors.values():
            tensor.data[::4096].max(initial=0)
            progress.advance(tensor.nbytes)


def _listen(request, service):
    from waitress.channel import HTTPChannel
    from waitress.server import create_server

    from . import grammar
    from .app import application

    # A thread is held per request in flight: those that run, the queue, and some for what never waits.
    clients = _unbounded(request.max_clients)
    threads = min(_unbounded(request.max_queue) + service.plan.effective["max_seqs"], clients, 4096) + 16
    max_body = request.max_body_mb << 20
    sockets = {}
    service.max_clients = clients
    service.clients = lambda: sum(isinstance(found, HTTPChannel) for found in list(sockets.values()))
    try:
        server = create_server(
            application(service, request.cors, request.api_key),
            map=sockets,
            host=request.host,
            port=request.port,
            threads=threads,
            connection_limit=min(clients, 65536) + SPARE,
            channel_request_lookahead=1,
            max_request_body_size=max_body + 1,
            outbuf_high_watermark=1 << 20,
            ident="ds4server",
            clear_untrusted_proxy_headers=True,
        )
    except OSError as error:
        raise StartError(f"cannot listen on {request.host}:{request.port}: {error.strerror}") from None
    except ValueError:
        raise StartError(f"--host {request.host} is no address of this machine") from None
    service.engine.start()
    threading.Thread(target=grammar.warm, args=(service.conversation,), daemon=True).start()
    interrupt = _Interrupt(service.engine, request.grace)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    log.info("%s: %s on the %s backend, context %d", service.model_id, service.architecture,
             service.plan.effective["backend"], service.context)  # fmt: skip
    log.info("listening on http://%s:%s", request.host, server.effective_port)
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
