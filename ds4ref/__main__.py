"""The reference on the command line: logits, inspect, render, generate, tokenize, trace, tiny.

Exit codes: 0 done, 2 for anything wrong with an argument or a file (one sentence on stderr).

``ds4jax.__main__`` has the same commands on a device: it takes their arguments and what they do with a model from here.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from . import drafting, families, scaled, tiny
from .chat import CallArguments, CallBegin, ChatError, Options, Reasoning, Text
from .conversation import Conversation
from .generation import run
from .gguf import Artifact, ArtifactError
from .inspection import inspect, report
from .model import Model
from .progress import Progress
from .sampling import SamplingParams, fresh_seed
from .speculative import Speculator, Stepwise
from .speculative import run as run_with_drafts
from .stop import eos_policy
from .tokenizer import Tokenizer


class UsageError(ValueError):
    """One sentence about an argument."""


def main(argv=None):
    """Entry point of ``ds4ref``. Returns the exit code."""
    return run_command("ds4ref", parser().parse_args(argv))


def run_command(program, args):
    """Run the command that a parser chose and return the exit code: the command's own, or that of its mistake."""
    try:
        return args.run(args) or 0
    except BrokenPipeError:
        return 1
    except (UsageError, ArtifactError, ChatError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def parser():
    top = argparse.ArgumentParser(
        prog="ds4ref", description="A slow, readable NumPy reference of large model families, loaded from GGUF."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, text, model=True):
        return add_command(commands, name, run, text, model)

    sub = command("logits", logits, "Logits after every token of a sequence.")
    add_computing(sub)
    add_tokens(sub)
    add_output(sub, "written with one array, logits [T, V]")

    sub = command("trace", trace, "Every named intermediate of every layer, for each token of a sequence.")
    add_computing(sub)
    add_tokens(sub)
    add_output(sub, "arrays NAME [T, …]; ragged ones as NAME.T")

    sub = command("inspect", inspect_command, "What a file holds: architecture, config, tensors, state, and what is amiss.")
    sub.add_argument("--json", action="store_true", help="machine-readable, on one line")

    sub = command("tokenize", tokenize, "Token ids of a text.")
    sub.add_argument("text", nargs="?", help="the text; standard input when absent")
    sub.add_argument("--no-special", action="store_true", help="read special tokens in the text as plain text")
    sub.add_argument("--pieces", action="store_true", help="print id and piece, one a line, instead of the ids as JSON")

    sub = command("render", render, "The prompt of a chat request.")
    sub.add_argument("request", metavar="REQUEST.json", help="a chat completions request: messages, tools, thinking fields")
    sub.add_argument("--ids", action="store_true", help="print the token ids as JSON instead of the text")

    sub = command("generate", generate, "Continue a text, or answer a chat message, token by token.")
    add_computing(sub)
    add_generation(sub)

    sub = command("tiny", write_tiny, "Write a tiny random artifact of a family.", model=False)
    sub.add_argument("architecture", metavar="ARCH", help=f"one of {', '.join(sorted(families.FAMILIES))}")
    sub.add_argument("-o", "--output", metavar="F.gguf", required=True)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument(
        "--scale",
        metavar="SIZE",
        help=f"instead of tiny, weights of about SIZE bytes (300M, 1.6G), to measure: {', '.join(sorted(scaled.SHAPES))}",
    )
    return top


def add_command(commands, name, run, text, model=True):
    """A command's parser; ``run(args)`` does it. model: whether it reads a GGUF."""
    sub = commands.add_parser(name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sub.set_defaults(run=run)
    if model:
        sub.add_argument("-m", "--model", metavar="FILE", required=True, help="GGUF; of a split artifact the first shard")
    return sub


def add_computing(sub, dtypes=("float32", "float64")):
    """How a command computes."""
    sub.add_argument("--dtype", choices=dtypes, default="float32", help="arithmetic and state")
    sub.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help=f"family switch: {_switches()}")


def add_tokens(sub, required=True):
    sub.add_argument("--tokens", metavar="IDS.npy", required=required, help="token ids, an integer array [T]")


def add_output(sub, text):
    sub.add_argument("-o", "--output", metavar="OUT.npz", required=True, help=text)


def add_generation(sub):
    """What to answer, how long, and how to sample."""
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("-p", "--prompt", metavar="TEXT", help="raw text to continue")
    what.add_argument("--chat", metavar="TEXT", help="a user message, rendered by the file's chat protocol")
    sub.add_argument("-n", "--tokens", type=int, default=128, help="tokens to generate at most")
    sub.add_argument("--ctx", type=int, default=8192, help="tokens that prompt and answer may have together")
    sub.add_argument("--no-think", action="store_true", help="with --chat: answer without reasoning")
    sampling = SamplingParams()
    sub.add_argument("--temperature", type=float, default=sampling.temperature, help="0 is greedy")
    sub.add_argument("--top-k", type=int, default=sampling.top_k, help="0 and -1 switch it off")
    sub.add_argument("--top-p", type=float, default=sampling.top_p, help="1 switches it off")
    sub.add_argument("--min-p", type=float, default=sampling.min_p, help="0 switches it off")
    sub.add_argument("--seed", type=int, help="same seed, same text; random when absent")
    sub.add_argument("--presence-penalty", type=float, default=sampling.presence_penalty, help="-2 to 2")
    sub.add_argument("--frequency-penalty", type=float, default=sampling.frequency_penalty, help="-2 to 2")
    sub.add_argument("--repetition-penalty", type=float, default=sampling.repetition_penalty, help="1 switches it off")
    sub.add_argument("--logit-bias", action="append", default=[], metavar="ID=BIAS", help="added to a logit; -100 bans")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; up to 16 times")
    sub.add_argument("--logprobs", type=int, metavar="N", help="print each token's log-probability and the N likeliest")
    eos = sub.add_mutually_exclusive_group()
    eos.add_argument("--ignore-eos", action="store_true", help="never let the model end the answer")
    eos.add_argument("--ignore-eos-in-reasoning", action="store_true", help="nor inside an open reasoning block")
    sub.add_argument("--mtp", metavar="FILE", help="draft with this sidecar")
    sub.add_argument(
        "--draft",
        type=int,
        metavar="N",
        help="tokens to draft at a time at most; with --mtp as many as its drafter can, else none and from 1 on with the "
        "predictor in the model's file",
    )


def _switches():
    switches = {name: text for family in families.FAMILIES.values() for name, text in family.OPTIONS.items()}
    return "; ".join(f"{name}: {text}" for name, text in sorted(switches.items()))


def options_of(pairs):
    """``["qat=true", "context=1000"]`` → {"qat": True, "context": 1000}; words that are no JSON stay text."""
    options = {}
    for pair in pairs:
        name, found, text = pair.partition("=")
        if not found:
            raise UsageError(f"--option takes NAME=VALUE, got {pair!r}")
        try:
            options[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            options[name.replace("-", "_")] = text
    return options


def _open(args, context=None):
    options = options_of(args.option)
    return Model.open(args.model, np.dtype(args.dtype).type, context=options.pop("context", context), **options)


def token_ids(path, model):
    """The ids of a ``--tokens`` file [T], checked against what the model can take. UsageError otherwise."""
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"--tokens {path}: not an array of token ids ({error})") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else "an archive"
        raise UsageError(f"--tokens {path}: expected a one-dimensional integer array of at least one id, found {found}")
    outside = ids[(ids < 0) | (ids >= model.vocabulary)]
    if len(outside):
        raise UsageError(f"--tokens {path}: id {outside[0]} is outside the vocabulary of {model.vocabulary}")
    if len(ids) > model.context_cap:
        raise UsageError(f"--tokens {path}: {len(ids)} tokens exceed the context of {model.context_cap}")
    return ids


def logits(args):
    model = _open(args)
    write_logits(args.output, model, token_ids(args.tokens, model))


def write_logits(path, model, ids):
    """Compute the logits after every one of ``ids`` and write them."""
    state, rows = model.new_state(), np.empty((len(ids), model.vocabulary), np.float32)
    with Progress("logits", len(ids)) as progress:
        for at in range(0, len(ids), model.chunk):
            part = ids[at : at + model.chunk]
            rows[at : at + len(part)] = model.verify(state, part)
            progress.advance(len(part))
    _write_npz(path, {"logits": rows})


def trace(args):
    model = _open(args)
    ids, state, seen = token_ids(args.tokens, model), model.new_state(), {}
    with Progress("trace", len(ids)) as progress:
        for token in ids:
            model.step(state, token, lambda name, array: seen.setdefault(name, []).append(np.array(array)))
            progress.advance()
    arrays = {}
    for name, rows in seen.items():
        if len(rows) == len(ids) and len({row.shape for row in rows}) == 1:
            arrays[name] = np.stack(rows)
        else:
            arrays |= {f"{name}.{len(ids) - len(rows) + t}": row for t, row in enumerate(rows)}
    _write_npz(args.output, arrays)


def _write_npz(path, arrays):
    path = Path(path)
    beside = path.with_name(f".{path.name}.partial")
    try:
        with open(beside, "wb") as file:
            np.savez(file, **arrays)
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"--output {path}: cannot be written ({error.strerror})") from None
    finally:
        beside.unlink(missing_ok=True)


def inspect_command(args):
    found = inspect(Artifact.open(args.model))
    print(json.dumps(found) if args.json else report(found))


def tokenize(args):
    tokenizer = Tokenizer.from_artifact(Artifact.open(args.model))
    text = sys.stdin.read() if args.text is None else args.text
    ids = tokenizer.encode(text, parse_special=not args.no_special)
    print("\n".join(f"{i}\t{tokenizer.piece(i)}" for i in ids) if args.pieces else json.dumps(ids))


def render(args):
    try:
        request = json.loads(Path(args.request).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{args.request}: not a JSON request ({error})") from None
    conversation = Conversation(Artifact.open(args.model))
    prompt = conversation.render_request(request)
    if args.ids:
        print(json.dumps(conversation.encode(prompt)))
    else:
        sys.stdout.write(prompt.text)


def generate(args):
    model = _open(args, args.ctx)
    drafter, width = drafter_of(args, model) or (None, 0)
    speculator = drafter and Speculator(Stepwise(model, model.new_state()), drafter, width)
    write_answer(model, answer_of(args, model), speculator)


def drafter_of(args, model, attach=drafting.attach):
    """(drafter, drafts of a trial at most), or None where none is asked for. UsageError for a width that the drafter has not.

    attach: of the package that computes.
    """
    if args.mtp is None and not args.draft:
        if args.draft is not None:
            raise UsageError(f"--draft must be at least 1, got {args.draft}")
        return None
    drafter = attach(model, args.mtp)
    width = drafter.longest if args.draft is None else args.draft
    if not 1 <= width <= drafter.longest:
        raise UsageError(f"--draft must be from 1 to {drafter.longest} with this drafter, got {width}")
    return drafter, width


def answer_of(args, model):
    """The answer that the arguments of ``generate`` ask ``model`` for, not begun. UsageError for what does not fit."""
    if not 1 <= args.ctx <= model.context_cap:
        raise UsageError(f"--ctx must be from 1 to {model.context_cap} for this file, got {args.ctx}")
    if args.tokens < 0:
        raise UsageError(f"--tokens must be at least 0, got {args.tokens}")
    try:
        params = _sampling(args)
        params.check_vocabulary(model.vocabulary)
        return _answer(args, model, params)
    except ValueError as error:
        raise UsageError(str(error)) from None


def write_answer(model, answer, speculator=None):
    """Compute ``answer`` to its end: the text to stdout as it comes; log-probabilities, counts and times to stderr.

    speculator: what drafts, on a state of its own that is empty.
    """
    start, first = time.monotonic(), None
    with Progress("prefill", len(answer.prompt)) as progress:
        steps = _drafted(answer, speculator, progress) if speculator else _plain(model, answer, progress)
    for step in steps:
        first = first or time.monotonic()
        for event in step.events:
            sys.stdout.write(_shown(event))
        for entry in step.logprobs:
            top = ", ".join(f"{answer.tokenizer.piece(token)!r} {value:.4f}" for token, value in entry.top)
            print(f"{answer.tokenizer.piece(entry.token)!r} {entry.logprob:.4f}  [{top}]", file=sys.stderr)
        sys.stdout.flush()
    print()
    counts = f"{len(answer.prompt)} prompt tokens, {len(answer.generated)} generated, finish: {answer.finish}"
    later, seconds = len(answer.generated) - 1, time.monotonic() - first
    rate = f", then {later / seconds:.1f} tokens/s" if later > 0 and seconds > 0 else ""
    print(f"{counts}; first token after {first - start:.2f} s{rate}", file=sys.stderr)
    if speculator:
        share = f" ({speculator.accepted / speculator.drafted:.0%})" if speculator.drafted else ""
        kept = f"{speculator.accepted} of {speculator.drafted} drafts kept{share}"
        print(f"{kept} in {speculator.trials} trials, {speculator.pace.paused} pauses", file=sys.stderr)


def _plain(model, answer, progress):
    """Compute the prompt; → the steps of the answer."""
    state = model.new_state()
    for at in range(0, len(answer.prompt), model.chunk):
        part = answer.prompt[at : at + model.chunk]
        model.prefill(state, part)
        progress.advance(len(part))
    return run(model, state, answer, prompt=())


def _drafted(answer, speculator, progress):
    """As :func:`_plain`, with drafts."""
    size = speculator.target.model.chunk
    for at in range(0, len(answer.prompt), size):
        part = answer.prompt[at : at + size]
        speculator.prefill(part)
        progress.advance(len(part))
    return run_with_drafts(speculator, answer, prompt=())


def _answer(args, model, params):
    """The generation that the arguments ask for: a raw continuation or a chat answer."""
    conversation = Conversation(model.artifact)
    prompt = None
    if args.chat is None:
        ids = conversation.encode_raw(args.prompt)
    else:
        options = Options(thinking=not args.no_think, context=args.ctx)
        prompt = conversation.render([{"role": "user", "content": args.chat}], None, options)
        ids = conversation.encode(prompt)
    if not 0 < len(ids) < args.ctx:
        raise UsageError(f"the prompt has {len(ids)} tokens; between 1 and {args.ctx - 1} fit a context of {args.ctx}")
    eos = eos_policy(args.ignore_eos, args.ignore_eos_in_reasoning)
    if eos != "model" and not conversation.end_ids:
        raise UsageError("--ignore-eos needs a tokenizer with an end token, and this file names none")
    return conversation.generation(
        ids, params, budget=args.tokens, context=args.ctx, prompt=prompt, stop_strings=args.stop, eos=eos,
        vocabulary=model.vocabulary, stream=True,
    )  # fmt: skip


def _sampling(args):
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=fresh_seed() if args.seed is None else args.seed,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        logit_bias=_biases(args.logit_bias),
        logprobs=args.logprobs is not None,
        top_logprobs=args.logprobs or 0,
    )


def _shown(event):
    """An event as terminal text: reasoning dimmed, calls as they come."""
    match event:
        case Reasoning(text):
            return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text
        case Text(text):
            return text
        case CallBegin(_, name):
            return f"\n[call {name} "
        case CallArguments(_, fragment):
            return fragment
        case _:
            return "]\n"


def _biases(pairs):
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias takes ID=BIAS, got {pair!r}") from None
    return biases


def write_tiny(args):
    if args.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {args.seed}")
    try:
        if args.scale is None:
            tiny.write(args.architecture, args.output, args.seed)
        else:
            scaled.write(args.architecture, args.output, bytes_of(args.scale), args.seed)
    except OSError as error:
        raise UsageError(f"--output {args.output}: cannot be written ({error.strerror})") from None


def bytes_of(text):
    """``"1.6G"`` → 1600000000; K, M and G are powers of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text, re.IGNORECASE)
    if not found:
        raise UsageError(f"--scale takes a size such as 300M or 1.6G, got {text!r}")
    return round(float(found[1]) * 1000 ** " KMG".index(found[2].upper() or " "))


if __name__ == "__main__":
    sys.exit(main())
