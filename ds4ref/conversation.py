"""Text on both sides of a model: an artifact's tokenizer, chat protocol and generation stops, bound together.

Knows nothing about models, states or HTTP.
"""

from functools import cached_property

from . import chat
from .chat.request import thinking
from .generation import Generation
from .gguf import ArtifactError
from .guidance import Guidance, ReasoningTokens, straddling
from .stop import ReasoningTracker, StopPolicy
from .tokenizer import Tokenizer


class Conversation:
    """Renders requests to tokens and makes the :class:`Generation` that reads the answer.

    ArtifactError when the artifact's vocabulary or template cannot be used.
    """

    def __init__(self, artifact):
        self.tokenizer = Tokenizer.from_artifact(artifact)
        tokenizer = self.tokenizer
        specials = chat.Specials(
            literals=frozenset(tokenizer.specials),
            bos="" if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id),
            eos="" if tokenizer.eos_id is None else tokenizer.piece(tokenizer.eos_id),
        )
        try:
            self.chat = chat.for_artifact(artifact.metadata, specials, artifact.path.name)
        except chat.ChatError as error:
            raise ArtifactError(f"{artifact.path.name}: {error}") from None
        # A turn marker that the model writes by itself ends its turn too: it is masked and stops like the end token.
        named = (tokenizer.id_of(text) for text in self.chat.protocol.STOPS)
        ends = (tokenizer.eos_id, *tokenizer.eot_ids, *named)
        self.end_ids = frozenset(i for i in ends if i is not None)

    def render(self, messages, tools=None, options=None, blocks=None):
        """The prompt of a conversation. blocks: call id → the ``chat.Block`` kept for it, which is rendered as it was
        sampled. ChatError for messages that cannot be rendered."""
        return self.chat.render(messages, tools, options or chat.Options(), blocks)

    def options_of(self, request, context=None, alias=None):
        """What a Chat Completions request asks of the rendering: its thinking controls and template variables."""
        on, effort = thinking(request, alias)
        kwargs = request.get("chat_template_kwargs") or {}
        return chat.Options(thinking=on, effort=effort, context=context, template_kwargs=kwargs)

    def render_request(self, request, context=None, alias=None):
        """The prompt of a Chat Completions request: its messages, tools and thinking controls."""
        if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
            raise chat.ChatError("messages must be an array of messages", "messages")
        return self.render(request["messages"], request.get("tools") or None, self.options_of(request, context, alias))

    def marks(self, messages, tools, options, ids, blocks=None):
        """Positions of the prompt ``ids`` up to which the next turn's prompt is expected to repeat it, rising. blocks: what the
        prompt was rendered with.

        Templates drop parts of a turn from history: the reasoning, an empty reasoning block, the tag that opened it. Where
        they do, the next prompt departs before this one's end, and a state kept at that point serves it. The points are
        found by rendering what may come next: an answer and a new question or, with tools, a call and its result.
        """
        turns = [({"role": "assistant", "content": "."}, {"role": "user", "content": "."})]
        if tools:
            call = {"id": "call_0", "type": "function", "function": {"name": tools[0]["function"]["name"], "arguments": "{}"}}
            turns.append((
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_0", "content": "."},
            ))  # fmt: skip
        marks = set()
        for turn in turns:
            try:
                following = self.encode(self.render([*messages, *turn], tools, options, blocks))
            except chat.ChatError:
                continue  # a template that refuses this turn says nothing about the next one
            marks.add(next((n for n, (a, b) in enumerate(zip(ids, following, strict=False)) if a != b), len(ids)))
        return tuple(sorted(mark for mark in marks if 0 < mark < len(ids)))

    def opening(self, messages, tools, options, ids, blocks=None):
        """The position up to which the prompt ``ids`` is what every conversation with its instructions begins with: where the
        text of the last user message before the first answer begins. None where there is no such message. blocks: what the
        prompt was rendered with.

        It is found by rendering another text in its place.
        """
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        asked = next((i for i in reversed(range(first)) if messages[i]["role"] == "user"), None)
        if asked is None:
            return None
        text = "-" if (messages[asked].get("content") or "").startswith(".") else "."
        others = [*messages[:asked], messages[asked] | {"content": text}, *messages[asked + 1 :]]
        try:
            other = self.encode(self.render(others, tools, options, blocks))
        except chat.ChatError:
            return None
        return next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)

    def encode(self, prompt):
        """Token ids of a rendered prompt: markers only where the template wrote them, and exactly one BOS if one is due."""
        return self.tokenizer.with_bos(self.tokenizer.encode(prompt.text, plain=prompt.plain))

    def encode_raw(self, text):
        """Token ids of raw text, special tokens in it read as such, with the BOS the tokenizer wants."""
        return self.tokenizer.with_bos(self.tokenizer.encode(text))

    def generation(self, ids, params, *, budget, context, prompt=None, tools=None, stop_strings=(), eos="model",
                   stream=False, choice=0, vocabulary=None, single=False, grammar=None, thinking_budget=None):  # fmt: skip
        """The answer to ``ids``: parsed by the chat protocol when ``prompt`` is the rendered prompt, raw text when None.

        grammar: what the answer behind its reasoning must follow (``guidance``), which is begun anew for each generation.
        thinking_budget: reasoning tokens after which the marker that ends reasoning is forced.
        """
        parser = tracker = guidance = None
        markers = frozenset()
        if prompt is not None:
            markers = frozenset(self.chat.protocol.MARKERS)
            parser = self.chat.parser(prompt, tools, stream=stream, single=single, tentative=grammar is None)
            opening, closing = ([tag.encode() for tag in tags] for tags in chat.reasoning_tags(self.chat.protocol))
            if opening:
                tracker = ReasoningTracker(tuple(opening), tuple(closing), prompt.thinking)
        if grammar is not None or (thinking_budget is not None and tracker is not None):
            guidance = self._guidance(prompt, grammar, thinking_budget)
        return Generation(
            self.tokenizer, list(ids), params, budget, context, StopPolicy(self.end_ids, eos=eos), parser,
            markers, tuple(stop_strings), tracker, choice, vocabulary, guidance,
        )  # fmt: skip

    def _guidance(self, prompt, grammar, budget):
        openings, closings = chat.reasoning_tags(self.chat.protocol)
        if prompt is None or not openings:
            return Guidance(grammar=grammar)
        text = prompt.text.rstrip()
        opened = next((tag for tag in openings if text.endswith(tag)), openings[0])
        return Guidance(
            self._reasoning_tokens, grammar, budget, reasoning_open=prompt.thinking,
            may_open=not text.endswith(closings), closing=self._closing_ids(opened),
        )  # fmt: skip

    def _closing_ids(self, opening):
        openings, closings = chat.reasoning_tags(self.chat.protocol)
        at = openings.index(opening)
        return tuple(self.tokenizer.encode(closings[at] if len(closings) == len(openings) else closings[0]))

    @cached_property
    def _reasoning_tokens(self):
        tokenizer = self.tokenizer
        openings, closings = chat.reasoning_tags(self.chat.protocol)
        special = tokenizer.specials
        markers = {special[text] for text in self.chat.protocol.MARKERS if text in special and text not in closings}
        return ReasoningTokens(
            {special[text]: self._closing_ids(text) for text in openings if text in special},
            frozenset(markers), self.end_ids,
            straddling([tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)], [tag.encode() for tag in closings]),
        )
