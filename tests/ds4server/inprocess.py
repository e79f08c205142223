"""The WSGI application over an engine of its own, in this process, on a model that says what it is told to."""

import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import falcon.testing
import numpy as np

from ds4ref.conversation import Conversation
from ds4ref.gguf import Artifact
from ds4server.app import Service, application
from ds4server.engine import Engine
from ds4server.metrics import Durations

from .artifact import toy
from .toymodel import Toy, reuser, tokenizer

CHAT = "/v1/chat/completions"
CONVERSATION = Conversation(Artifact.open(toy()))
PLAN = SimpleNamespace(
    effective={"prefix_reuse": "partial", "backend": "reference", "disk": False, "max_seqs": 1},
    as_json=lambda: {"effective": {"ctx": 4096}}
)


class Scripted(Toy):
    """Says ``script``, whatever it is asked. gate: an event that every pass waits for."""

    def __init__(self, script="", **more):
        super().__init__(**more)
        self.script = [*tokenizer().encode(script), tokenizer().eos_id]
        self.gate = threading.Event()
        self.gate.set()
        self._at = {}

    def feed(self, state, token):
        self.gate.wait(20)
        super().feed(state, token)
        at = self._at[id(state)]
        if self.script[1:]:
            state.logits = np.zeros(self.vocabulary, np.float32)
            state.logits[self.script[min(at, len(self.script) - 1)]] = 99

    def prefill(self, state, tokens):
        self._at[id(state)] = 0
        return super().prefill(state, tokens)

    def step(self, state, token):
        self._at[id(state)] += 1
        return super().step(state, token)


class Babbler(Toy):
    """Says what its logits are, which depend on everything before; never in a hurry to end."""

    gate = threading.Event()


class InProcess:
    """A running engine and a client of its application. ``ended``: functions of a job."""

    def __init__(self, model, *ended, width=1, **options):
        self.durations = Durations()
        observers = (self.durations.add, *ended)
        self.engine = Engine(model, reuser(model, max(2, width)), ended=lambda job: [see(job) for see in observers], **options)
        self.service = Service(
            engine=self.engine, conversation=CONVERSATION, plan=PLAN, model_id="toy", architecture="deepseek4",
            vocabulary=model.vocabulary, context=4096, created=0, durations=self.durations,
        )  # fmt: skip
        self.client = falcon.testing.TestClient(application(self.service))

    def chat(self, content="Hello", gone=False, **fields):
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8} | fields
        extras = {"waitress.client_disconnected": lambda: gone}
        return self.client.simulate_post(CHAT, body=json.dumps(body), extras=extras)

    def stats(self):
        return self.client.simulate_get("/v1/stats").json


@contextmanager
def running(model, *ended, **options):
    found = InProcess(model, *ended, **options)
    found.engine.start()
    try:
        yield found
    finally:
        model.gate.set()
        found.engine.stop(0)
