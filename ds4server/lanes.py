"""Where a request is computed: the routing table of the serving contract, and the gathering of static rows. Pure.

=============  ===============================================================================================
serial         one request at a time, everything
continuous     rows of the bank driver, which join and leave between two steps
static         two or more buffered greedy rows that begin together, where no driver runs the banks
=============  ===============================================================================================

Knows nothing about jobs, banks or threads.
"""

from dataclasses import dataclass

SERIAL, CONTINUOUS, STATIC = LANES = ("serial", "continuous", "static")
SURFACES = ("openai_chat", "openai_completion", "anthropic_messages", "openai_responses")
SWITCHES = {"anthropic": "anthropic_messages", "responses": "openai_responses"}
"""What ``DS4_SERVER_CONT_…`` calls a surface."""

REASONS = (
    "continuous", "continuous_bank_continuation", "static_no_cont", "static_prompt_bounds", "cont_unavailable", "coalesce_off",
    "surface", "need_live_frontier", "need_prefill_only", "need_continuation_publish", "need_corrective_recovery",
    "need_durable_response", "token_ids_projection", "tools_completion_kind",
)  # fmt: skip
"""Every reason there is. The last five never occur here: how tools are parsed does not depend on the lane."""

REJECTED = "continuous admission rejected; serial fallback"
FAILED = "the batched attempt failed before its first token; serial fallback"


@dataclass(frozen=True)
class Needs:
    """What a request asks of a lane. prompt, budget: tokens; thinks: whether it may answer with reasoning; frontier: "serial"
    or "bank" where it continues a tool turn whose live state that one holds."""

    prompt: int
    budget: int
    greedy: bool = False
    stream: bool = True
    thinks: bool = False
    stops: bool = False
    tools: bool = False
    images: bool = False
    audio: bool = False
    token_ids: bool = False
    frontier: str | None = None

    @property
    def static(self):
        """Whether a buffered greedy row serves it."""
        asks = (self.stream, self.thinks, self.stops, self.tools, self.images, self.audio, self.token_ids)
        return self.greedy and self.budget > 0 and not any(asks)


@dataclass(frozen=True)
class Environment:
    """What the process offers. driver: whether the bank driver is present; off: no bank lane was asked for; capacity: tokens of
    a bank's sequence, None for as many as a request may have; serial_surfaces: names of ``SURFACES``."""

    driver: bool = False
    width: int = 1
    off: bool = False
    capacity: int | None = None
    media_serial: bool = False
    serial_speculation: bool = False
    serial_surfaces: frozenset = frozenset()

    def holds(self, prompt):
        """Whether a bank's sequence can begin with a prompt of so many tokens."""
        return prompt > 0 and (self.capacity is None or prompt <= self.capacity)


def route(needs, surface, env):
    """(lane, reason) of a request that came in on ``surface``; the first row of the table that holds."""
    static = needs.static and env.width >= 2
    table = (
        (needs.frontier == SERIAL, SERIAL, "need_live_frontier"),
        (needs.budget == 0, SERIAL, "need_prefill_only"),
        (beyond_banks(needs, env) is not None, SERIAL, "cont_unavailable"),
        (surface in env.serial_surfaces, SERIAL, "surface"),
        (env.off, SERIAL, "coalesce_off"),
        (env.driver and env.holds(needs.prompt), CONTINUOUS,
         "continuous_bank_continuation" if needs.frontier == "bank" else "continuous"),
        (static and not env.driver, STATIC, "static_no_cont"),
        (static, STATIC, "static_prompt_bounds"),
    )  # fmt: skip
    return next(((lane, reason) for holds, lane, reason in table if holds), (SERIAL, "cont_unavailable"))


def beyond_banks(needs, env):
    """Why no bank takes the request, one phrase, or None."""
    if needs.audio:
        return "audio is computed on the serial lane"
    if needs.images and env.media_serial:
        return "images of this family are computed on the serial lane"
    return "speculation of this family runs on the serial lane" if env.serial_speculation else None


def fallback(needs, env):
    """Why a present bank driver does not compute a request that it might, or None: nothing is replaced where there is none."""
    if not env.driver:
        return None
    if (why := beyond_banks(needs, env)) is not None:
        return why
    return None if env.holds(needs.prompt) else f"the prompt of {needs.prompt} tokens is beyond the {env.capacity} of a bank"


def gather(lanes, width, waited, wait):
    """How many of the waiting requests begin now as static rows; 0 to wait for more.

    lanes: of the waiting requests, in order of arrival; the first that is not static ends the row. waited, wait: milliseconds
    since the first began to wait, and that it waits at most. One row alone is to be run serially.
    """
    rows = 0
    while rows < min(width, len(lanes)) and lanes[rows] == STATIC:
        rows += 1
    closed = rows == width or rows < len(lanes)
    return rows if closed or waited >= wait else 0
