"""Banks that are held for a turn they owe: the answer called tools, and its conversation goes on with their results.

While tools run, another conversation could take the bank, and the prompt would be computed again. So the bank is protected
after such an answer, if it holds enough that computing it again costs more than waiting. A hold ends when a prompt begins
with all of what the bank holds, which is the turn that it owes or a copy of it; after ``HELD`` seconds; and, oldest first, when
another request has waited ``PATIENCE`` seconds for a bank: tools may never answer.

One thread calls everything here. Knows nothing about jobs, lanes or disks.
"""

import time
from dataclasses import dataclass, field

TOKENS = 1024  # from which a bank is held: fewer are computed again in moments
HELD = 10.0
PATIENCE = 1.0


@dataclass
class Holds:
    """tokens, held, patience: as the constants; clock: () → seconds."""

    tokens: int = TOKENS
    held: float = HELD
    patience: float = PATIENCE
    clock: object = time.monotonic
    _until: dict = field(default_factory=dict)  # bank → when its hold ends

    def __contains__(self, bank):
        return bank in self._until

    def hold(self, bank):
        """Protect a bank that has just been retired, if it is worth it."""
        if bank.state.length >= self.tokens:
            bank.protected = True
            self._until[bank] = self.clock() + self.held

    def answers(self, prompt):
        """Whether ``prompt`` goes on with what a held bank holds; that bank is free from now on."""
        owed = [bank for bank in self._until if bank.state.tokens == prompt[: bank.state.length]]
        for bank in owed:
            self._release(bank)
        return bool(owed)

    def expire(self, waiting=None):
        """End the holds whose time is over, and the oldest where a request waits for a bank since ``waiting``, seconds on the
        clock. → milliseconds after which to ask again, None where nothing is held."""
        now = self.clock()
        for bank in [bank for bank, until in self._until.items() if until <= now]:
            self._release(bank)
        ends = list(self._until.values())
        if ends and waiting is not None:
            if now >= waiting + self.patience:
                self._release(min(self._until, key=self._until.get))
            else:
                ends.append(waiting + self.patience)
        return 1000 * (min(ends) - now) if ends else None

    def forget(self, bank):
        """A bank has been emptied, or given to a request."""
        self._until.pop(bank, None)

    def _release(self, bank):
        del self._until[bank]
        bank.protected = False
