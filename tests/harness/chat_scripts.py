"""Conversations of chat formats piece by piece, each labelled with the turn that wrote it; no template is involved.

Messages are as a template takes them, but for ``reasoning``, which every format has under that name here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    """Text of a conversation, the index of the assistant message that wrote it, and whether it ended the turn."""

    text: str
    turn: int | None = None
    stop: bool = False


Script = Callable[[Sequence[Message], Tools], list[Piece]]


def _given(text: str) -> Piece:
    return Piece(text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _json(arguments)


def _calls(message: Message) -> list[tuple[str, str, str]]:
    """Return id, name and arguments' text of each call."""
    calls = message.get("tool_calls") or []
    return [(call["id"], call["function"]["name"], _text_of(call["function"]["arguments"])) for call in calls]


def _last_user(messages: Sequence[Message]) -> int:
    return max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _split_thought(message: Message) -> tuple[str, str]:
    """Return reasoning and answer, from the field or from the text."""
    thought, body = message.get("reasoning") or "", message["content"]
    if not thought and "</think>" in body:
        thought = body.split("</think>")[0].split("<think>")[-1]
        body = body.split("</think>")[-1].lstrip("\n")
    return thought.strip(), body


def chatml(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    pieces = []
    for at, message in enumerate(messages):
        calls = "".join(f"<tool_call>{name} {arguments}</tool_call>" for _, name, arguments in _calls(message))
        pieces.append(_given(f"<|im_start|>{message['role']}\n"))
        if message["role"] == "assistant":
            pieces += [Piece(message["content"] + calls, at), Piece("<|im_end|>", at, stop=True), _given("\n")]
        else:
            pieces.append(_given(message["content"] + "<|im_end|>\n"))
    return pieces


def _qwen(messages: Sequence[Message], tools: Tools, opened: str) -> list[Piece]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    pieces = []
    if tools:
        listed = "".join(_json(tool) + "\n" for tool in tools)
        told = "" if system is None else system + "\n\n"
        pieces.append(_given(f"<|im_start|>system\n{told}# Functions\n{listed}<|im_end|>\n"))
    elif system is not None:
        pieces.append(_given(f"<|im_start|>system\n{system}<|im_end|>\n"))
    last_user = _last_user(messages)
    for at, message in enumerate(messages):
        if message["role"] == "user":
            pieces.append(_given(f"<|im_start|>user\n{message['content']}<|im_end|>\n"))
        elif message["role"] == "tool":
            opens = messages[at - 1]["role"] != "tool"
            closes = at + 1 == len(messages) or messages[at + 1]["role"] != "tool"
            pieces.append(_given("<|im_start|>user" if opens else ""))
            pieces.append(_given(f"\n<tool_response>\n{message['content']}\n</tool_response>"))
            pieces.append(_given("<|im_end|>\n" if closes else ""))
        elif message["role"] == "assistant":
            thought, body = _split_thought(message)
            calls = [
                f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
                for _, name, arguments in _calls(message)
            ]
            called = ("\n" if body and calls else "") + "\n".join(calls)
            pieces.append(_given("<|im_start|>assistant\n"))
            if at > last_user and thought:
                pieces.append(_given(opened))
                block = f"<think>\n{thought}\n</think>\n\n".removeprefix(opened)
                pieces.append(Piece(block + body.lstrip("\n") + called, at))
            elif at > last_user and at + 1 == len(messages):  # a block that the template inserts
                pieces.append(_given("<think>\n\n</think>\n\n"))
                pieces.append(Piece(body.lstrip("\n") + called, at))
            else:
                pieces.append(Piece(body + called, at))
            pieces += [Piece("<|im_end|>", at, stop=True), _given("\n")]
    return pieces


def qwen3(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    return _qwen(messages, tools, "")


def qwen3_thinking(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    return _qwen(messages, tools, "<think>\n")


def glm(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    listed = "".join(_json(tool) + "\n" for tool in tools)
    pieces = [_given("[gMASK]<sop>" + (f"<|system|>\n# Functions\n{listed}" if tools else ""))]
    last_user = _last_user(messages)
    for at, message in enumerate(messages):
        if message["role"] in ("user", "system"):
            pieces.append(_given(f"<|{message['role']}|>\n{message['content']}"))
        elif message["role"] == "tool":
            pieces.append(_given("<|observation|>" if messages[at - 1]["role"] != "tool" else ""))
            pieces.append(_given(f"\n<tool_response>\n{message['content']}\n</tool_response>"))
        elif message["role"] == "assistant":
            thought, body = _split_thought(message)
            said = f"\n{body.strip()}" if body.strip() else ""
            for call in message.get("tool_calls") or []:
                said += f"\n<tool_call>{call['function']['name']}\n"
                for name, value in call["function"]["arguments"].items():
                    said += f"<arg_key>{name}</arg_key>\n<arg_value>{_text_of(value)}</arg_value>\n"
                said += "</tool_call>"
            pieces.append(_given("<|assistant|>"))
            if thought and at > last_user:
                said = f"\n<think>{thought}</think>{said}"
            else:
                pieces.append(_given("\n<think></think>"))
            pieces.append(Piece(said, at))
    return pieces


def llama(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    pieces = [_given("<|begin_of_text|>")]
    for at, message in enumerate(messages):
        role = "ipython" if message["role"] == "tool" else message["role"]
        pieces.append(_given(f"<|start_header_id|>{role}<|end_header_id|>\n\n"))
        calls = _calls(message)
        said = at if role == "assistant" else None
        if calls:
            _, name, arguments = calls[0]
            pieces.append(Piece(f'{{"name": "{name}", "parameters": {arguments}}}', said))
            pieces.append(Piece("<|eom_id|>", said, stop=True))
        else:
            pieces.append(Piece(message["content"].strip(), said))
            pieces.append(Piece("<|eot_id|>", said, stop=said is not None))
    return pieces


def harmony(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    pieces, called, last_user = [], "", _last_user(messages)
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            header = f"<|start|>functions.{called} to=assistant<|channel|>commentary<|message|>"
            pieces.append(_given(f"{header}{_json(message['content'])}<|end|>"))
        elif message["role"] == "assistant":
            pieces.append(_given("<|start|>assistant"))
            if message.get("reasoning") and at > last_user:
                thought = f"<|channel|>analysis<|message|>{message['reasoning']}<|end|>"
                pieces.append(Piece(f"{thought}<|start|>assistant", at))
            if message.get("tool_calls"):
                _, called, arguments = _calls(message)[0]
                pieces.append(Piece(f" to=functions.{called}<|channel|>commentary json<|message|>{arguments}", at))
                stop = "<|call|>"
            else:
                pieces.append(Piece(f"<|channel|>final<|message|>{message['content']}", at))
                stop = "<|return|>" if at + 1 == len(messages) else "<|end|>"
            pieces.append(Piece(stop, at, stop=True))
        else:
            pieces.append(_given(f"<|start|>{message['role']}<|message|>{message['content']}<|end|>"))
    return pieces


def mistral(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    pieces, last_user = [_given("<s>")], _last_user(messages)
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    for at, message in enumerate(messages):
        if message["role"] == "user":
            listed = f"[AVAILABLE_TOOLS] {_json(list(tools))}[/AVAILABLE_TOOLS]" if tools and at == last_user else ""
            told = system if at == last_user else ""
            pieces.append(_given(f"{listed}[INST] {told}{message['content']}[/INST]"))
        elif message["role"] == "tool":
            result = f'{{"content": {_json(message["content"])}, "call_id": "{message["tool_call_id"]}"}}'
            pieces.append(_given(f"[TOOL_RESULTS] {result}[/TOOL_RESULTS]"))
        elif message["role"] == "assistant":
            calls = [
                f'{{"name": "{call["function"]["name"]}", "arguments": {_json(call["function"]["arguments"])}, '
                f'"id": "{call["id"]}"}}'
                for call in message.get("tool_calls") or []
            ]
            pieces.append(Piece(f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else f" {message['content']}", at))
            pieces.append(Piece("</s>", at, stop=True))
    return pieces


def deepseek(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    pieces, asked = [_given(f"<｜begin▁of▁sentence｜>{system}")], False
    for at, message in enumerate(messages):
        if message["role"] == "user":
            asked = True
            pieces.append(_given(f"<｜User｜>{message['content']}"))
        elif message["role"] == "tool":
            pieces.append(_given(f"<｜tool▁output▁begin｜>{message['content']}<｜tool▁output▁end｜>"))
        elif message["role"] == "assistant":
            calls = "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
                for _, name, arguments in _calls(message)
            )
            pieces.append(_given("<｜Assistant｜></think>" if asked else ""))
            asked = False
            block = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
            pieces += [Piece(message["content"] + block, at), Piece("<｜end▁of▁sentence｜>", at, stop=True)]
    return pieces


def gemma(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    pieces = [_given("<bos>")]
    for at, message in enumerate(messages):
        if message["role"] == "user":
            pieces.append(_given(f"<start_of_turn>user\n{system}{message['content'].strip()}<end_of_turn>\n"))
            system = ""
        elif message["role"] == "assistant":
            pieces.append(_given("<start_of_turn>model\n"))
            pieces += [Piece(message["content"].strip(), at), Piece("<end_of_turn>", at, stop=True), _given("\n")]
    return pieces


def phi(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    pieces = []
    for at, message in enumerate(messages):
        pieces.append(_given(f"<|{message['role']}|>\n"))
        if message["role"] == "assistant":
            pieces += [Piece(message["content"], at), Piece("<|end|>", at, stop=True), _given("\n")]
        else:
            pieces.append(_given(f"{message['content']}<|end|>\n"))
    return [*pieces, _given("<|endoftext|>")]


def kimi(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    listed = f"<|im_system|>tool_declare<|im_middle|>{_json(list(tools))}<|im_end|>" if tools else ""
    default = "<|im_system|>system<|im_middle|>You are a helper.<|im_end|>"
    pieces = [_given(listed + ("" if messages[0]["role"] == "system" else default))]
    for at, message in enumerate(messages):
        role = message["role"]
        opener = role if role in ("user", "assistant") else "system"
        pieces.append(_given(f"<|im_{opener}|>{role}<|im_middle|>"))
        if role == "assistant":
            calls = "".join(
                f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                for call_id, _, arguments in _calls(message)
            )
            block = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
            pieces += [Piece(message["content"] + block, at), Piece("<|im_end|>", at, stop=True)]
        else:
            answered = f"## Return of {message['tool_call_id']}\n" if role == "tool" else ""
            pieces.append(_given(f"{answered}{message['content']}<|im_end|>"))
    return pieces


def vicuna(messages: Sequence[Message], tools: Tools) -> list[Piece]:
    pieces = []
    for at, message in enumerate(messages):
        if message["role"] == "system":
            pieces.append(_given(f"{message['content']}\n\n"))
        elif message["role"] == "user":
            pieces.append(_given(f"USER: {message['content']}"))
        else:
            pieces.append(_given(" ASSISTANT:"))
            pieces += [Piece(f" {message['content']}", at), Piece("</s>", at, stop=True)]
    return pieces
