"""Random conversations of a chat format's family, spelled like public data, with the expected tokens and masks."""

import json
from dataclasses import dataclass, field

from harness.chat_scripts import Message, Piece
from hypothesis import strategies as st

SWITCHES = ("loss", "weight", "train")
CUT_KEYS = [
    ("finish_reason", "length"), ("finish_reason", {"type": "length"}), ("stop_reason", "max_tokens"),
    ("stop_reason", "length"), ("stop_reason", "Max_Tokens"), ("finish_reason", "MaxTokens"),
]  # fmt: skip
WHOLE_KEYS = [
    ("finish_reason", "stop"), ("finish_reason", "tool_calls"), ("finish_reason", None), ("stop_reason", "end_turn"),
    ("finish_reason", {"type": "stop", "matched": 7}), ("stop_reason", None),
]  # fmt: skip
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Find a größe", "parameters": {}}}]


def switches(*values):
    return [(name, value) for name in SWITCHES for value in values]


@dataclass
class Turn:
    """One assistant message: its place, the weight of its tokens, and whether it was cut."""

    at: int
    weight: float = 1.0
    cut: bool = False

    @property
    def open_end(self):
        """Whether tokens behind the last scored one may be missing, because nothing scored depends on them."""
        return self.cut or self.weight == 0


@dataclass
class Case:
    """A conversation as a record spells it, and as the template takes it."""

    record: dict
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def tools(self):
        return self.record.get("tools") or []


def texts(*more):
    common = ["hello", "two plus two", "\nfirst", "last\n", "\n\nboth\n\n", " spaced ", "größe 😀 二\u200d", "a\tb"]
    return st.sampled_from([*common, *more]) | st.text(alphabet='ab \n.ñ🙂<|>{}"', min_size=1, max_size=6)


def _arguments(draw, family):
    """Return arguments as the template takes them, and as the record has them."""
    given = draw(st.sampled_from([{}, {"k": "a b"}, {"n": 1, "deep": [1.5, {"ü": None}]}, [1]]))
    if isinstance(given, list):
        return (given, json.dumps(given)) if family.free_arguments else ({}, "")
    forms = [given, json.dumps(given), json.dumps(given, ensure_ascii=False), *(() if given else ("", None))]
    return given, draw(st.sampled_from(forms))


def _switch(draw, turn):
    kind = draw(st.sampled_from(["none", "none", "on", "off", "number", "null"]))
    if kind == "none":
        return {}
    if kind == "null":
        return {draw(st.sampled_from(SWITCHES)): None}
    if kind == "number":
        turn.weight = draw(st.sampled_from([0.5, 2.0]))
        return {draw(st.sampled_from(SWITCHES)): turn.weight}
    turn.weight = float(kind == "on")
    return dict([draw(st.sampled_from(switches(True, 1) if kind == "on" else switches(False, 0)))])


def _cut(draw, turn):
    turn.cut = draw(st.integers(0, 3)) == 0
    if not turn.cut and draw(st.booleans()):
        return {}
    return dict([draw(st.sampled_from(CUT_KEYS if turn.cut else WHOLE_KEYS))])


class _Builder:
    def __init__(self, draw, family, marked):
        self.draw, self.family, self.marked = draw, family, marked
        self.case, self.rows, self.calls = Case({}), [], 0
        self.text = texts(*(f"x{token}y" for token in family.control[:6]))
        self.said = st.just("") | texts(f"x{family.eos}y")

    def given(self, role, content, **keys):
        self.case.messages.append({"role": role, "content": content, **keys})
        spelled = {"role": role, "content": content, **keys}
        if self.marked and self.draw(st.integers(0, 5)) == 0:
            spelled |= dict([self.draw(st.sampled_from([("loss", 0), ("weight", 1), ("train", False)]))])
        self.rows.append(self._in_parts(spelled))

    def _in_parts(self, row):
        """Return a row whose content may be a list of parts, as OpenAI has it."""
        content = row["content"]
        if not content or self.draw(st.integers(0, 5)):
            return row
        half = len(content) // 2
        return row | {"content": [{"type": "text", "text": text} for text in (content[:half], content[half:])]}

    def said_by_assistant(self, content, calls=0):
        family, draw = self.family, self.draw
        turn = Turn(len(self.case.messages))
        message, row = {"role": "assistant", "content": content}, {"role": "assistant", "content": content}
        has_thought = family.reasoning and draw(st.booleans()) and not (content and "</think>" in content)
        if has_thought:
            message["reasoning"] = draw(st.sampled_from(["add them", "é\n\nb"]))
            row[draw(st.sampled_from(REASONING_NAMES))] = message["reasoning"]
        elif draw(st.integers(0, 3)) == 0:
            row[draw(st.sampled_from(REASONING_NAMES))] = draw(st.sampled_from(["", None]))
        if calls:
            made, spelled = zip(*[self._call() for _ in range(calls)], strict=True)
            message["tool_calls"], row["tool_calls"] = list(made), list(spelled)
            row["content"] = content or draw(st.sampled_from(["", None]))
        if self.marked:
            row |= _switch(draw, turn) | _cut(draw, turn)
        self.case.messages.append(message)
        self.case.turns.append(turn)
        self.rows.append(self._in_parts(row))
        return list(zip(message.get("tool_calls", []), row.get("tool_calls", []), strict=True))

    def _call(self):
        self.calls += 1
        given, spelled = _arguments(self.draw, self.family)
        named = self.draw(st.booleans())
        call_id = f"id{self.calls:07d}" if named else f"call{self.calls:05d}"
        name = self.draw(st.sampled_from(["find", "get_it"]))
        own = {"id": call_id} if named else {}
        function = {"name": name, "arguments": spelled}
        shapes = [own | function, own | {"type": "function", "function": function}]
        made = {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
        return made, self.draw(st.sampled_from(shapes))

    def results(self, calls):
        for made, spelled in calls:
            self.given("tool", self.draw(self.text), tool_call_id=made["id"])
            if "id" not in spelled or self.draw(st.booleans()):
                del self.rows[-1]["tool_call_id"]

    def exchange(self, kind):
        family, draw = self.family, self.draw
        if kind == "calls":
            spoken = draw(self.said) if family.calls_with_text else ""
            calls = self.said_by_assistant(spoken, draw(st.integers(1, family.calls)))
            self.results(calls)
        elif kind == "raw":
            self.said_by_assistant('<tool_call>\n{"name": "find"}\n</tool_call>')
            for _ in range(draw(st.integers(1, 2))):
                self.given("tool", draw(self.text))
        elif kind == "twice":
            self.said_by_assistant(draw(self.said))
        thinks = family.inline_reasoning and draw(st.integers(0, 3)) == 0
        self.said_by_assistant("<think>\nby\n\nhand\n</think>\n\nanswer" if thinks else draw(self.said))


@st.composite
def conversations(draw, family, *, marked=True, most_exchanges=3):
    """Draw a case; without ``marked``, no turn is switched off, weighted or cut."""
    build = _Builder(draw, family, marked)
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        build.given(role if family.developer else "system", draw(st.sampled_from(["Be brief.", "Sei\nkurz. "])))
        build.rows[-1]["role"] = role
    takes = {"calls": family.calls, "raw": family.raw_calls, "twice": family.consecutive}
    kinds = ["plain", *(kind for kind, taken in takes.items() if taken)]
    for _ in range(draw(st.integers(1, most_exchanges))):
        build.given("user", draw(build.text))
        build.exchange(draw(st.sampled_from(kinds)))
    if draw(st.booleans()):
        build.given("user", "bye")
    build.case.record["messages"] = build.rows
    last = build.case.turns[-1]
    if marked and not {key for key, _ in CUT_KEYS} & build.rows[last.at].keys():
        build.case.record |= _cut(draw, last)
    if family.tools and draw(st.booleans()):
        build.case.record["tools"] = TOOLS
    return build.case


@dataclass
class Expected:
    """A turn behind its history; ``joined`` if the tokenizer would join the end of the prompt with the answer."""

    text: str
    tokens: list[int]
    mask: list[float]
    joined: bool


def encode(official, text):
    return list(official(text, add_special_tokens=False)["input_ids"])


def rendered(family, official, messages, tools, **options):
    """Return transformers' rendering of a conversation: text or token ids."""
    options = {"tokenize": True} | options
    done = official.apply_chat_template(family.template_messages(messages), tools=tools or None, **options)
    return list(done["input_ids"]) if options["tokenize"] else done


def pieces_of_turn(family, case, turn) -> tuple[str, str, str, str]:
    """Return the texts of a turn as the last message: prompt, answer, stop token, and the template's additions."""
    pieces: list[Piece] = family.script(case.messages[: turn.at + 1], case.tools)
    first = next(place for place, piece in enumerate(pieces) if piece.turn == turn.at)
    stop = "".join(piece.text for piece in pieces if piece.turn == turn.at and piece.stop)
    following = case.messages[turn.at + 1] if turn.at + 1 < len(case.messages) else None
    prompt = "".join(piece.text for piece in pieces[:first])
    answer = "".join(piece.text for piece in pieces if piece.turn == turn.at and not piece.stop)
    added = "".join(piece.text for piece in pieces[first:] if piece.turn is None)
    return prompt, answer, stop or family.stop_behind(case.messages[turn.at], following), added


def expected_turns(family, official, case) -> list[Expected]:
    """Return the expected values of each turn: transformers' tokens, and the mask of the assistant's text."""
    turns = []
    for turn in case.turns:
        prompt, answer, stop, _ = pieces_of_turn(family, case, turn)
        tokens = rendered(family, official, case.messages[: turn.at + 1], case.tools)
        given, whole = encode(official, prompt), encode(official, prompt + answer + stop)
        opener = encode(official, stop) if family.ended_by_next else []
        joined = whole[: len(given)] != given
        assert (tokens + opener)[: len(whole)] == whole
        if joined:  # the model was given the one and wrote the other
            whole = given + encode(official, answer + stop)
        written = len(whole) - len(given)
        scored = written - 1 if turn.cut else written
        mask = [0.0] * len(given) + [turn.weight] * scored + [0.0] * (written - scored)
        turns.append(Expected(prompt + answer + stop, whole, mask, joined))
    return turns
