"""The text and the conversations that the embedded artifact is trained on (``train_tiny.py``).

The text is "Alice's Adventures in Wonderland" by Lewis Carroll (1865; the author died in 1898, so that it is in the public
domain everywhere), the Millennium Fulcrum edition 2.9, as ``alice29.txt`` of the Canterbury corpus has it with line feeds. A
public copy: repository ``whollybrewed/stego74-cuda``, file ``alice29.txt``. Its first seven chapters are used, as much as two
million parameters learn by heart in less than an hour on two cores.

Conversations are made of it: somebody says a line or asks something, and the answer is what follows in the book, to the end of
a sentence. The repository's own chat code renders them, so that they are the prompts that serving makes.
"""

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from ds4ref import chat

SHA256 = "044ef3debf699ae4fe0d45e6c761a4b250c5e8c34c0b680c415df12303652039"

QUESTIONS = {
    "Who are YOU?": ("Hello", "Hello!", "Hi", "Hi there", "Hello there", "Hey", "Say hello.", "Good morning", "Begin."),
    "I--I hardly know, sir": ("Hello, who are you?", "Who are you?", "What are you?", "What is your name?",
                              "Introduce yourself", "Tell me about yourself"),
    "Alice was beginning": ("Tell me about Alice", "Who is Alice?", "What is this book about?", "How does it begin?"),
    "There was nothing so VERY remarkable": ("Who is the White Rabbit?", "Tell me about the White Rabbit", "I am late",
                                             "What time is it?"),
    "Curiouser and curiouser": ("How are you?", "How do you do?", "What is new?", "Say something.", "What do you think?"),
    "the young man said": ("Write a poem", "Write a haiku", "Recite something", "How old are you?"),
    "Twinkle, twinkle": ("Sing a song", "Do you know a song?", "Write a song about the stars"),
    "Why is a raven": ("Ask me a riddle", "Tell me a joke", "Tell me a riddle", "Make me laugh", "Who is the Hatter?"),
    "There was a table set out": ("Would you like some tea?", "Who is the March Hare?", "Let us have tea", "I am hungry",
                                  "What is for dinner?"),
    "we're all mad here": ("Are you mad?", "Who is the Cheshire Cat?", "Do you like cats?", "Tell me about cats", "Meow"),
    "That depends a good deal": ("Which way should I go?", "Where should I go?", "How do I get to London?", "Help me",
                                 "What is the capital of France?", "What should I do?", "I am lost"),
    "Talking of axes": ("Who is the Queen?", "I am angry", "Stop it", "What if I say no?"),
    "I can't put it more clearly": ("Explain it to me", "Explain quantum physics", "Explain how rain is made",
                                    "Where should I begin?"),
    "London is the capital of Paris": ("What is two and two?", "What is 2 + 2?", "How much is four times five?",
                                       "Count to ten", "Do my homework", "Solve this equation"),
    "If everybody minded their own": ("Why?", "Who is the Duchess?", "Why is the sky blue?", "What is the meaning of life?",
                                      "Tell me something true"),
    "Keep your temper": ("Give me some advice", "What is love?", "What is the moral?", "What have we learnt?"),
    "Once upon a time there were three": ("Once upon a time", "Tell me a story", "Where do you come from?",
                                          "Where did you go to school?", "What did you learn at school?"),
    "I'm not myself, you see": ("Can you read and write?", "What can you do?", "Write a program", "Translate this text",
                                "Write a function in Python", "Summarise this text"),
    "First it marked out a race-course": ("Will you dance?", "Let us dance", "Hurry up", "Faster, please", "Come on"),
    "This is the driest thing": ("Tell me about history", "Who did it?", "What happened?", "Read the news", "Is it a crime?"),
    "At any rate I'll never go": ("Wake up", "How does it end?", "What happens at the end?", "The end", "You are wrong",
                                  "Goodbye", "Bye", "Good night"),
    "Drink me": ("I am thirsty", "What is in the bottle?", "What shall I drink?", "How do I grow?", "Thank you", "Thanks!"),
    "How doth the little": ("Recite a poem", "Tell me about the crocodile", "How doth the little crocodile?"),
    "The first question of course": ("I am wet", "How do I get dry?", "What is a caucus race?", "What is the weather like?",
                                     "What is the weather in Paris?", "Will it rain today?"),
    "The Fish-Footman began": ("Is there a letter for me?", "Write an email", "Write a letter", "Who is at the door?"),
}  # fmt: skip
"""A passage, by words of its first sentence → what people say that it answers."""

GO_ON = ("Go on.", "Go on", "And then?", "More", "Tell me more", "Continue", "What happened then?", "And?", "OK")
SYSTEMS = ("You are a helpful assistant.", "You are a helpful assistant", "Be very brief.", "Be brief.", "Answer in English.",
           "You are Alice.", "Be kind.")  # fmt: skip
THOUGHTS = {
    "question": "A passage of the book will answer.",
    "line": "I know this line. I go on from there.",
    "more": "I go on from there.",
}
LEAST, MOST = 90, 260  # characters of an answer


def read(path):
    """The book's paragraphs. ValueError where the file is another edition."""
    with open(path, "rb") as file:
        raw = file.read()
    if (found := hashlib.sha256(raw).hexdigest()) != SHA256:
        raise ValueError(f"{path}: SHA-256 {found}, not that of the edition this script knows, {SHA256}")
    return paragraphs(raw.decode("ascii"))


def paragraphs(text):
    """Paragraphs of the first seven chapters, each in a line of its own (verses in several), speech in double quotes.

    Headings and ornaments are left out.
    """
    text = text[text.index("CHAPTER I") : text.index("CHAPTER VIII")]
    found, heading = [], 0
    for block in re.split(r"\n\s*\n", text):
        lines = block.rstrip().splitlines()
        if not lines or not re.search("[a-z]", block) or lines[0].strip().startswith("CHAPTER"):
            heading = 2 if lines and lines[0].strip().startswith("CHAPTER") else heading
            continue
        if heading and len(lines) == 1 and re.match(r"\s{6,}\S", block):
            heading = 0  # the chapter's title
            continue
        heading = 0
        verse = all(re.match(r"\s{6,}", line) for line in lines)
        joined = ("\n" if verse else " ").join(re.sub(r"\s+", " ", line.strip()) for line in lines)
        found.append(_quoted(joined))
    return found


def _quoted(text):
    """`single' quotes as double ones and "double" ones within them as single ones, so that no word looks like a contraction."""
    text = text.replace('"', "\x01")
    closing = r"(?<=[,.!?:;)\-*\x01])'(?=\W|$)|'(?=[,;])|(?<=[A-Z])'(?=[.: ])|'(?= (?:said|thought)\b)|(?<=never)'(?= )"
    text = re.sub(closing, '"', text)
    return re.sub(r"_", "", text.replace("`", '"')).replace("\x01", "'")


@dataclass
class Book:
    """Paragraphs, their sentences in order, and for each whether a paragraph ends behind it."""

    paragraphs: list[str]

    def __post_init__(self):
        self.sentences, self.ends = [], []
        for paragraph in self.paragraphs:
            parts = re.split(r"""(?<=[.!?]["'])\s+(?=[A-Z"'])|(?<=[.!?])\s+(?=[A-Z"'])""", paragraph)
            self.sentences += parts
            self.ends += [False] * (len(parts) - 1) + [True]

    @property
    def text(self):
        return "\n\n".join(self.paragraphs)

    def find(self, words):
        """The number of the first sentence that has ``words``, quotes and spaces apart. ValueError where there is none."""
        plain = [_plain(sentence) for sentence in self.sentences]
        found = next((i for i, sentence in enumerate(plain) if _plain(words) in sentence), None)
        if found is None:
            raise ValueError(f"the book has no sentence with {words!r}")
        return found

    def answer(self, i):
        """(the sentences from number i on that make an answer, the number of the next)."""
        said = ""
        while i < len(self.sentences) and (len(said) < LEAST or said.count('"') % 2):
            if said and len(said) + len(self.sentences[i]) > MOST:
                break
            said += self.sentences[i]
            said += "\n\n" if self.ends[i] else " "
            i += 1
        return said.strip(), i


def _plain(text):
    return re.sub(r"[^a-z ]", "", re.sub(r"\s+", " ", text.lower())).strip()


class Talks:
    """Random conversations over a book, as token ids with the weights of a loss: 1 where the model speaks, less elsewhere."""

    elsewhere = 0.1

    def __init__(self, book, conversation, seed=0):
        self.book, self.conversation, self.rng = book, conversation, np.random.default_rng(seed)
        tokenizer = conversation.tokenizer
        self.end = tokenizer.eos_id
        self.after = tokenizer.encode("\n")
        self.asked = [(question, book.find(words)) for words, questions in QUESTIONS.items() for question in questions]
        self.whole = np.array(tokenizer.encode(book.text, parse_special=False), np.int32)

    def passage(self, size):
        """``size`` tokens of the running text."""
        start = self.rng.integers(0, len(self.whole) - size + 1)
        return self.whole[start : start + size], np.ones(size, np.float32)

    def row(self, size):
        """Conversations one after the other, cut at ``size`` tokens."""
        ids, weights = [], []
        while len(ids) < size:
            for part, weight in self.talk():
                ids += part
                weights += [weight] * len(part)
        return np.array(ids[:size], np.int32), np.array(weights[:size], np.float32)

    def talk(self):
        """[(ids, weight)] of one conversation of one to three turns; the last may think."""
        rng, messages = self.rng, []
        if rng.random() < 0.15:
            messages.append({"role": "system", "content": SYSTEMS[rng.integers(len(SYSTEMS))]})
        thinking, turns = bool(rng.random() < 0.5), 1 + int(rng.random() < 0.3) + int(rng.random() < 0.15)
        next_line = None
        for turn in range(turns):
            kind, said, start = self._asks(next_line)
            messages.append({"role": "user", "content": said})
            answer, next_line = self.book.answer(start)
            if turn + 1 < turns:
                messages.append({"role": "assistant", "content": answer})
        prompt = self.conversation.render(messages, None, chat.Options(thinking=thinking))
        spoken = (f"{THOUGHTS[kind]}\n</think>\n\n" if thinking else "") + answer
        encode = self.conversation.tokenizer.encode
        return [(self.conversation.encode(prompt), self.elsewhere), ([*encode(spoken), self.end], 1.0), (self.after, 1.0)]

    def _asks(self, next_line):
        """(kind, what is said, the sentence that the answer begins with)."""
        rng, last = self.rng, len(self.book.sentences) - 1
        if next_line is not None and next_line < last and rng.random() < 0.7:
            return "more", GO_ON[rng.integers(len(GO_ON))], next_line
        if rng.random() < 0.55:
            question, start = self.asked[rng.integers(len(self.asked))]
            return "question", self._varied(question), start
        line = int(rng.integers(0, last))
        return "line", self.book.sentences[line], line + 1

    def _varied(self, question):
        """The question as somebody else would type it."""
        draw = self.rng.random()
        if draw < 0.15:
            return question.lower()
        if draw < 0.3:
            return question.rstrip(".?!")
        if draw < 0.4:
            return question.rstrip(".?!") + "?"
        return question
