"""``POST /tokenize`` and ``/detokenize``: the tokenizer and the chat template by themselves. The engine has no part in it."""

from typing import Any

from .ask import prompt_of
from .body import read_object
from .chat import CONTROLS, ChatRequest, ask_of
from .chat_messages import kind
from .errors import bad_request
from .requests import Fields, parse, shown, whole

SHAPING = ("model", "messages", "tools", "tool_choice", *CONTROLS)
"""Fields of a chat request that decide what its prompt is."""


class TokenizeRequest(Fields):
    """``content`` (or ``prompt``): text as it stands; or ``messages`` and what else of a chat request shapes its prompt."""

    content: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Fields):
    tokens: Any = None


class Tokenize:
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        body = read_object(req)
        request = parse(TokenizeRequest, body)
        prompt = None
        if request.messages is not None:
            prompt, ids = self._rendered(body)
        else:
            ids = self._plain(request)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": self._service.context}
        if prompt is not None:
            answer["prompt"] = prompt
        if request.with_pieces:
            answer["pieces"] = [{"id": token, "piece": _piece(self._service.conversation.tokenizer, token)} for token in ids]
        resp.media = answer

    def _plain(self, request):
        text = request.content if request.content is not None else request.prompt
        if text is None:
            raise bad_request("content is required: a string (or prompt, or messages)", "content")
        tokenizer = self._service.conversation.tokenizer
        ids = tokenizer.encode(text, parse_special=request.parse_special is not False)
        return tokenizer.with_bos(ids) if request.add_special else ids

    def _rendered(self, body):
        body = {name: value for name, value in body.items() if name in SHAPING}
        prompt, ids, *_ = prompt_of(self._service, ask_of(self._service, body, parse(ChatRequest, body)))
        return prompt.text, ids


class Detokenize:
    """The resource. ``service`` is the running server's context (``app.Service``)."""

    def __init__(self, service):
        self._service = service

    def on_post(self, req, resp):
        request = parse(DetokenizeRequest, read_object(req))
        if request.tokens is None:
            raise bad_request("tokens is required: an array of token ids", "tokens")
        ids = token_ids(self._service, request.tokens, "tokens")
        resp.media = {"content": self._service.conversation.tokenizer.decode(ids)}


def token_ids(service, value, path):
    """``value`` as token ids of the vocabulary. ApiError 400."""
    if not isinstance(value, list):
        raise bad_request(f"{path} must be an array of token ids, got {kind(value)}", path)
    return [_token_id(service, item, f"{path}[{i}]") for i, item in enumerate(value)]


def _token_id(service, value, path):
    size, found = service.conversation.tokenizer.vocab_size, whole(value)
    if isinstance(found, bool) or not isinstance(found, int):
        raise bad_request(f"{path} must be an integer, got {shown(found)}", path)
    if not 0 <= found < size:
        raise bad_request(f"{path} must be a token id from 0 to {size - 1}, got {found}", path)
    return found


def _piece(tokenizer, token):
    """A token's text, or its bytes where they are no text by themselves."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
