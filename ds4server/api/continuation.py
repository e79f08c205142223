"""Results of tool calls whose calls the client does not replay: the conversation that waits for them is continued."""

from .errors import bad_request


def continued(service, messages, field):
    """(``messages``, canonical, such that every result has its call before it; "serial" or "bank" where they go on from a live
    turn, whose state that one holds, else None).

    Results without their calls must come first and be those of one answer of this server that waits for them; they then go on
    where it ended, under the instructions it was given under. ApiError 400 naming ``field`` where there is no such answer.
    """
    orphans = results_without_calls(messages)
    if not orphans:
        return messages, None
    rest = messages[next(i for i, message in enumerate(messages) if message["role"] != "system") :]
    waiting = service.tools.pending(orphans)
    if waiting is None or [message.get("tool_call_id") for message in rest[: len(orphans)]] != orphans:
        shown = ", ".join(repr(name)[:60] for name in orphans[:3])
        raise bad_request(
            f"{field}: no call stands before the result for {shown}, and nothing here waits for it; replay the full history",
            field,
        )  # fmt: skip
    return [*waiting.messages, *rest], waiting.frontier


def results_without_calls(messages):
    """The ids of results (canonical messages of role ``tool``) whose call stands nowhere before them, in order."""
    called, orphans = set(), []
    for message in messages:
        called.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            orphans.append(message["tool_call_id"])
    return orphans
