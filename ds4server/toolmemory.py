"""What the server remembers about the tool calls of its answers, by their ids.

Of each answer with calls: the call block exactly as it was sampled, so that a client's replay of the calls renders the original
bytes (contract, section 15), and the conversation up to it, so that a request which brings only the results can go on there.
Both are bounded and forgotten in order of last use. Blocks may also come from the records of the disk store.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

from ds4ref.chat import Block

MAX_IDS = 100_000
MAX_TEXT = 512 << 20  # bytes of blocks
MAX_PENDING = 64  # conversations that wait for results
MAX_PENDING_TOKENS = 16 << 20  # of their prompts


class Pending(NamedTuple):
    """A conversation that waits for results. frontier: whose live state ends there, "serial" or "bank"; size: its tokens."""

    messages: list[dict]
    frontier: str
    size: int


class ToolMemory:
    """max_ids: of calls whose blocks are kept; exact: whether blocks are kept at all. stored: a function from ids to the blocks
    that records on disk name (id → text), called from any thread; calls_in: a function from a block's text and a
    request's tools to the number of calls in it. Any thread may use it."""

    def __init__(self, max_ids=MAX_IDS, exact=True, stored=lambda ids: {}, calls_in=lambda text, tools: 1):
        self._max_ids, self._exact, self._stored, self._calls_in = max_ids, exact, stored, calls_in
        self._lock = threading.Lock()
        self._blocks = OrderedDict()  # a block's ids → the block, the one used last at the end
        self._ids_of = {}  # id → the ids of its block
        self._text = 0
        self._pending = OrderedDict()  # ids → Pending
        self._pending_size = 0

    def remember(self, ids, block, pending):
        """An answer has ended with calls of these ids. block: their text as sampled, or None where it cannot be replayed;
        pending: the conversation with the answer. Returns id → text of what is replayed."""
        ids, exact = tuple(ids), block is not None and self._exact
        with self._lock:
            if exact:
                self._keep(Block(block, ids))
            self._pending[ids] = pending
            self._pending_size += pending.size
            while len(self._pending) > MAX_PENDING or (self._pending_size > MAX_PENDING_TOKENS and len(self._pending) > 1):
                self._pending_size -= self._pending.popitem(last=False)[1].size
        return dict.fromkeys(ids, block) if exact else {}

    def _keep(self, block):
        if block.ids in self._blocks:
            return
        self._blocks[block.ids] = block
        self._ids_of |= dict.fromkeys(block.ids, block.ids)
        self._text += len(block.text.encode())
        while self._blocks and (len(self._ids_of) > self._max_ids or self._text > MAX_TEXT):
            ids, old = self._blocks.popitem(last=False)
            self._text -= len(old.text.encode())
            for name in ids:
                del self._ids_of[name]

    def blocks(self, messages, tools=None):
        """Id → :class:`Block` of the calls in ``messages`` that are known, for ``Conversation.render`` with ``tools``."""
        if not self._exact:
            return {}
        wanted = [str(call.get("id")) for message in messages for call in message.get("tool_calls") or () if call.get("id")]
        with self._lock:
            missing = [name for name in wanted if name not in self._ids_of]
        if missing:
            self._load(missing, tools)
        with self._lock:
            found = {name: self._ids_of[name] for name in wanted if name in self._ids_of}
            for ids in dict.fromkeys(found.values()):
                self._blocks.move_to_end(ids)
            return {name: self._blocks[ids] for name, ids in found.items()}

    def _load(self, ids, tools):
        """Take over what the disk knows of ``ids``, which are in the order of the conversation: as many consecutive ones as a
        block has calls belong to it."""
        texts, at = self._stored(ids), 0
        ids = [name for name in ids if name in texts]
        while at < len(ids):
            text = texts[ids[at]]
            group = tuple(ids[at : at + max(1, self._calls_in(text, tools))])
            at += len(group)
            if all(texts[name] == text for name in group):
                with self._lock:
                    self._keep(Block(text, group))

    def pending(self, ids):
        """The :class:`Pending` conversation whose last calls are exactly those of ``ids`` in any order; None where it is not
        known."""
        with self._lock:
            found = next((key for key in reversed(self._pending) if set(key) == set(ids)), None)
            if found is None:
                return None
            self._pending.move_to_end(found)
            return self._pending[found]

    def known(self):
        """(ids, bytes) of the blocks that are kept."""
        with self._lock:
            return len(self._ids_of), self._text
