"""The chat format of Naive-N0.5-Flash (architecture `naive_n05_flash`): MiMo-V2's turns and calls, with an effort.

A prompt opens with two system blocks, `Reasoning Effort: Max` (or High, or Low) and the system text, a default naming the
model where none is given. The words of the API: minimal, low and medium are Low, high and xhigh High, max and nothing
Max; `reasoning_effort` among the template variables is the template's own word. With thinking off the line stays at Max
and the prompt ends in `<think></think>`; with thinking on the model writes `<think>` itself.

History-stable point: a sampled answer is rendered again as it was, so everything stays, as long as the effort does (it
stands at the very front). With keep_all_reasoning false a prompt is stable up to the first assistant turn behind the
previous user message.

Source: the family's page, which describes the published template. Knows nothing about token ids.
"""
from collections.abc import Mapping, Sequence

from ds4ref.chat import NO_SPECIALS, Block, Options, Prompt, Specials, chatml, mimo, turns
from ds4ref.chat.chatml import END, END_RESPONSE, REASONING, RESPONSE, START
from ds4ref.chat.mimo import CALLS, MARKERS, Parser

__all__ = ["CALLS", "MARKERS", "REASONING", "STOPS", "Parser", "refuse_template", "render"]

STOPS = (END, "<|endoftext|>")

_LITERALS = frozenset({START, RESPONSE, END_RESPONSE, *STOPS, *MARKERS})
_DEFAULT = "You are Naive-N0.5-Flash, a helpful AI assistant engineered by Naive AI."
_LINES = {"low": "Low", "high": "High"}
_LEVELS = {"minimal": "low", "low": "low", "medium": "low", "high": "high", "xhigh": "high", "max": "max"}


def refuse_template(template: str) -> str | None:
    """Why an embedded template is not this one, None if it is."""
    return None if START in template and "<function=" in template else "it does not write ChatML with <function=…> calls"


def render(messages: Sequence[Mapping], tools: Sequence[Mapping] | None, options: Options, *,
           template: str | None = None, specials: Specials = NO_SPECIALS,
           blocks: Mapping[str, Block] | None = None) -> Prompt:
    """Render a conversation: with the template, or by its written rules. Raises ChatError."""
    word = turns.effort(options)
    thinking = word != "none"
    effort = chatml.native_effort(options) or _LEVELS.get(word or "")
    extra = options.template_kwargs
    guard = turns.guard_for(_LITERALS, specials, messages, tools, options, blocks, template)
    prepared = chatml.prepare(messages, guard, blocks, mimo.SYNTAX)
    functions = [guard.data(tool) for tool in tools or ()]
    if template is None:
        text = f"{START}system\nReasoning Effort: {_LINES.get(effort or '', 'Max')}{END}"
        text += mimo.encode(prepared, functions, default=_DEFAULT, keep=bool(extra.get("keep_all_reasoning", True)))
        text += mimo.opening(thinking) if extra.get("add_generation_prompt", True) else ""
    else:
        named = None if effort is None else guard.text(effort)
        text = turns.through_template(template, prepared, functions, options, specials, guard, enable_thinking=thinking,
                                      reasoning_effort=named)
    return turns.finished(text, guard, chatml.OPEN)
