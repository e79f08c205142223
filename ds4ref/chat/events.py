"""What a chat protocol's parser reports, and the buffered answer made of it.

A parser is a pure state machine: text in, events out. Joined per kind and call, the events are the same for any
split of the text. Knows nothing about HTTP, tokens or ids of calls.
"""
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """A piece of reasoning, never empty."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of visible text, never empty."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """Call number `index` (0, 1, 2 …) begins. Its arguments are empty so far."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of the call's arguments, never empty."""

    index: int
    fragment: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete: its joined fragments are one valid JSON object. A call that never ends was cut off."""

    index: int


Event = Reasoning | Text | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class Call:
    """A complete call: the tool's name and its arguments, a JSON object as text, keys in the order generated."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A buffered answer."""

    reasoning: str
    text: str
    calls: tuple[Call, ...]


def collect(events: Iterable[Event]) -> Message:
    """Join events into one message. Calls without an end are left out."""
    reasoning, text, calls = [], [], []
    name, arguments = "", []
    for event in events:
        match event:
            case Reasoning(piece):
                reasoning.append(piece)
            case Text(piece):
                text.append(piece)
            case CallBegin(_, name):
                arguments = []
            case CallArguments(_, fragment):
                arguments.append(fragment)
            case CallEnd(_):
                calls.append(Call(name, "".join(arguments)))
    return Message("".join(reasoning), "".join(text), tuple(calls))


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring pieces of one kind (and call) joined: what any split of the text has in common."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        match last, event:
            case (Reasoning(a), Reasoning(b)):
                out[-1] = Reasoning(a + b)
            case (Text(a), Text(b)):
                out[-1] = Text(a + b)
            case (CallArguments(i, a), CallArguments(j, b)) if i == j:
                out[-1] = CallArguments(i, a + b)
            case _:
                out.append(event)
    return out
