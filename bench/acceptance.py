"""How many greedy drafts of the embedded artifact's predictor are kept, on the reference.

    python bench/acceptance.py [-m model.gguf] [--widths 1 2 3]

Two kinds of answers, 20 of each: continuations of the book it was trained on, from 24 tokens at places spread over the text, 48
tokens each; and chats, thinking off and on in turns, to their end. Half of the chats' first messages are among those of the
training, half are not. Printed for every width, the most drafts of a trial: drafts kept of those that were judged, and
tokens per trial. Answers are those without drafts, whatever the width: the target judges.
"""

import argparse
from importlib.resources import as_file, files
from pathlib import Path

from tiny_text import Book, read

from ds4ref import drafting
from ds4ref.chat import Options
from ds4ref.conversation import Conversation
from ds4ref.model import Model
from ds4ref.sampling import SamplingParams
from ds4ref.speculative import Speculator, Stepwise, run

TEXT = Path(__file__).with_name("alice29.txt")
CHATS = (
    "Hello", "Who are you?", "Tell me about the White Rabbit", "Why is the sky blue?", "Tell me a joke", "How do you do?",
    "What is the capital of France?", "Write a poem", "Do you like cats?", "Goodbye",
    "Good evening, my friend", "What did the Queen say?", "Why did she cry?", "Tell me about the garden.",
    "What is a tea party?", "Can you help me with my garden?", "Where is the rabbit now?",
    "What did the Cat say?", "Is the Duchess at home?",
    "Please write me a letter to my sister",
)  # fmt: skip
CONTEXT, GIVEN, CONTINUED, LONGEST = 512, 24, 48, 200


def answers(model, conversation):
    """(kind, the generation) of every answer, not begun."""
    greedy = SamplingParams(temperature=0.0)
    whole = conversation.tokenizer.encode(Book(read(TEXT)).text, parse_special=False)
    for n in range(20):
        start = n * (len(whole) - GIVEN) // 20
        ids = whole[start : start + GIVEN]
        yield "text", conversation.generation(ids, greedy, budget=CONTINUED, context=CONTEXT, vocabulary=model.vocabulary)
    for n, said in enumerate(CHATS):
        prompt = conversation.render([{"role": "user", "content": said}], None, Options(thinking=n % 2 == 1))
        ids = conversation.encode(prompt)
        yield "chats", conversation.generation(
            ids, greedy, budget=LONGEST, context=CONTEXT, prompt=prompt, vocabulary=model.vocabulary
        )  # fmt: skip


def measure(model, conversation, width):
    """kind → [drafts kept, drafts judged, trials, tokens, answers that ended by themselves]."""
    drafter, counts = drafting.attach(model), {}
    for kind, answer in answers(model, conversation):
        speculator = Speculator(Stepwise(model, model.new_state()), drafter, width)
        steps = list(run(speculator, answer))
        seen = (speculator.accepted, speculator.drafted, speculator.trials, len(steps), answer.finish == "stop")
        counts[kind] = [a + b for a, b in zip(counts.get(kind, [0] * 5), seen, strict=True)]
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    with as_file(files("ds4server") / "tiny.gguf") as embedded:
        model = Model.open(args.model or embedded)
        conversation = Conversation(model.artifact)
        print("| drafts at most | answers | kept | of judged | share | tokens a trial | ended by themselves |")
        print("|---|---|---|---|---|---|---|")
        for width in args.widths:
            for kind, (kept, judged, trials, tokens, ended) in measure(model, conversation, width).items():
                share = f"{kept / judged:.0%} | {(kept + trials) / trials:.2f}" if trials else "– | –"
                print(f"| {width} | {kind} ({tokens} tokens) | {kept} | {judged} | {share} | {ended} of 20 |", flush=True)


if __name__ == "__main__":
    main()
