"""Tokenizer folders of the chat formats that models use, made here: control tokens and templates in their structure.

``chat_scripts`` builds the same conversations without a template, and labels the author of each text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import chat_scripts as scripts

# Words are split before newlines, as in the tokenizers of these models, so that "\n\n" is a token ahead of any text.
_PIECES = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_LEARNED = ["two plus two\n\nfour\n\n", "the answer is hello\n\n\n", "assistant user system developer tool think"] * 3

_ARGUMENTS = "{%- macro text_of(given) -%}{{- given if given is string else given | tojson -}}{%- endmacro -%}"
_THINKING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
"""
# The reasoning of a message and the text after it, from a field or from the text.
_SPLIT_THOUGHT = """
{%- set ns.thought = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- set ns.body = m.content -%}
{%- if not ns.thought and '</think>' in m.content -%}
  {%- set ns.thought = m.content.split('</think>')[0].split('<think>')[-1] -%}
  {%- set ns.body = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- set ns.thought = ns.thought.strip() -%}
"""

CHATML = (
    _ARGUMENTS
    + """
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' + m.content -}}
  {%- for c in m.tool_calls or [] -%}
    {{- '<tool_call>' + c.function.name + ' ' + text_of(c.function.arguments) + '</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)

_QWEN = (
    _ARGUMENTS
    + _THINKING
    + """
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
  {{- '# Functions\\n' -}}
  {%- for t in tools -%}{{- t | tojson + '\\n' -}}{%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif m.role == 'assistant' -%}
"""
    + _SPLIT_THOUGHT
    + """
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last and (loop.last or ns.thought) -%}
      {{- '<think>\\n' + ns.thought + '\\n</think>\\n\\n' + ns.body.lstrip('\\n') -}}
    {%- else -%}
      {{- ns.body -}}
    {%- endif -%}
    {%- for c in m.tool_calls or [] -%}
      {%- if ns.body or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + text_of(c.function.arguments) -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
"""
)
QWEN3 = (
    _QWEN
    + """
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
)
QWEN3_THINKING = (
    _QWEN
    + """
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
)

GLM = (
    _THINKING
    + """
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
  {{- '<|system|>\\n# Functions\\n' -}}
  {%- for t in tools -%}{{- t | tojson + '\\n' -}}{%- endfor -%}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {{- '<|user|>\\n' + m.content -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '/nothink' -}}{%- endif -%}
  {%- elif m.role == 'system' -%}
    {{- '<|system|>\\n' + m.content -}}
  {%- elif m.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
  {%- elif m.role == 'assistant' -%}
"""
    + _SPLIT_THOUGHT
    + """
    {{- '<|assistant|>' -}}
    {%- if loop.index0 > ns.last and ns.thought -%}
      {{- '\\n<think>' + ns.thought + '</think>' -}}
    {%- else -%}
      {{- '\\n<think></think>' -}}
    {%- endif -%}
    {%- if ns.body.strip() -%}{{- '\\n' + ns.body.strip() -}}{%- endif -%}
    {%- for c in m.tool_calls or [] -%}
      {{- '\\n<tool_call>' + c.function.name + '\\n' -}}
      {%- for name, value in c.function.arguments.items() -%}
        {{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' -}}
        {{- value if value is string else value | tojson -}}
        {{- '</arg_value>\\n' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '\\n<think></think>' -}}{%- endif -%}
{%- endif -%}
"""
)

LLAMA = (
    _ARGUMENTS
    + """
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
  {%- if m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('only one tool call in a message') -}}{%- endif -%}
    {%- set c = m.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + c.name + '", "parameters": ' -}}
    {{- text_of(c.arguments) + '}<|eom_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' -}}
    {{- m.content | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
)

HARMONY = (
    _ARGUMENTS
    + _THINKING
    + """
{%- set ns.called = '' -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if not ns.called -%}{{- raise_exception('a tool message follows no call') -}}{%- endif -%}
    {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' -}}
    {{- m.content | tojson + '<|end|>' -}}
  {%- elif m.role == 'assistant' -%}
    {%- if m.thinking and loop.index0 > ns.last -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
    {%- endif -%}
    {%- if m.tool_calls -%}
      {%- if m.tool_calls | length != 1 -%}{{- raise_exception('only one tool call in a message') -}}{%- endif -%}
      {%- set ns.called = m.tool_calls[0].function.name -%}
      {{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' -}}
      {{- text_of(m.tool_calls[0].function.arguments) + '<|call|>' -}}
    {%- else -%}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
      {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
    {%- endif -%}
  {%- else -%}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""
)

MISTRAL = (
    _THINKING
    + """
{{- bos_token -}}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- if tools and loop.index0 == ns.last -%}
      {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST] ' + (system if loop.index0 == ns.last else '') + m.content + '[/INST]' -}}
  {%- elif m.role == 'tool' -%}
    {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id -}}
    {{- '"}[/TOOL_RESULTS]' -}}
  {%- elif m.role == 'assistant' -%}
    {%- if messages[loop.index0 - 1].role == 'assistant' -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {%- if m.tool_calls -%}
      {{- '[TOOL_CALLS] [' -}}
      {%- for c in m.tool_calls -%}
        {{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson -}}
        {{- ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') -}}
      {%- endfor -%}
      {{- ']' -}}
    {%- else -%}
      {{- ' ' + m.content -}}
    {%- endif -%}
    {{- eos_token -}}
  {%- elif m.role != 'system' -%}
    {{- raise_exception('roles are system, user, assistant and tool') -}}
  {%- endif -%}
{%- endfor -%}
"""
)

DEEPSEEK = (
    _ARGUMENTS
    + """
{%- set ns = namespace(system='', asked=false) -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content -%}{%- endif -%}{%- endfor -%}
{{- bos_token + ns.system -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- set ns.asked = true -%}
    {{- '<｜User｜>' + m.content -}}
  {%- elif m.role == 'assistant' -%}
    {%- if ns.asked -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}
    {%- set ns.asked = false -%}
    {{- m.content -}}
    {%- if m.tool_calls -%}
      {{- '<｜tool▁calls▁begin｜>' -}}
      {%- for c in m.tool_calls -%}
        {{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + text_of(c.function.arguments) -}}
        {{- '<｜tool▁call▁end｜>' -}}
      {%- endfor -%}
      {{- '<｜tool▁calls▁end｜>' -}}
    {%- endif -%}
    {{- eos_token -}}
  {%- elif m.role == 'tool' -%}
    {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.asked -%}
  {{- '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') -}}
{%- endif -%}
"""
)

GEMMA = """
{{- bos_token -}}
{%- set has_system = messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' if has_system else '' -%}
{%- for m in (messages[1:] if has_system else messages) -%}
  {%- if m.role != ('assistant' if loop.index0 % 2 else 'user') -%}
    {{- raise_exception('roles must alternate between user and assistant') -}}
  {%- endif -%}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + (system if loop.first else '') -}}
  {{- m.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

PHI = """
{%- for m in messages -%}
  {%- if m.role in ('system', 'user', 'assistant') -%}
    {{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}
"""

KIMI = (
    _ARGUMENTS
    + """
{%- if tools -%}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' -}}{%- endif -%}
{%- if messages[0].role != 'system' -%}
  {{- '<|im_system|>system<|im_middle|>You are a helper.<|im_end|>' -}}
{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + m.role + '<|im_middle|>' -}}
  {%- if m.role == 'tool' -%}{{- '## Return of ' + m.tool_call_id + '\\n' -}}{%- endif -%}
  {{- m.content -}}
  {%- if m.tool_calls -%}
    {{- '<|tool_calls_section_begin|>' -}}
    {%- for c in m.tool_calls -%}
      {{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + text_of(c.function.arguments) -}}
      {{- '<|tool_call_end|>' -}}
    {%- endfor -%}
    {{- '<|tool_calls_section_end|>' -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
"""
)

VICUNA = """
{%- for m in messages -%}
  {%- if m.role == 'system' -%}
    {{- m.content + '\\n\\n' -}}
  {%- elif m.role == 'user' -%}
    {{- 'USER: ' + m.content -}}
  {%- elif m.role == 'assistant' -%}
    {{- ' ASSISTANT: ' + m.content + eos_token -}}
  {%- elif m.role == 'tool' -%}
    {{- raise_exception('tools are not supported') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ' ASSISTANT:' -}}{%- endif -%}
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat format, and the arguments of its template.

    Attributes:
        name: name for test ids.
        template: Jinja text of ``chat_template.jinja``.
        script: function that builds the same text without the template.
        control: control tokens, special ones.
        words: added tokens that are not special.
        bos: token of the tokenizer's ``bos_token``.
        eos: token of the tokenizer's ``eos_token``.
        stops: tokens of ``eos_token_id`` in ``generation_config.json``; None for a folder without that file.
        ended_by_next: whether a turn ends with the token that opens the next role.
        developer: whether the template writes role ``developer``.
        reasoning: key of the reasoning that the template writes; None if it writes none.
        inline_reasoning: whether the template looks for reasoning in the content.
        calls: most tool calls of a message; 0 if the template takes no tools.
        calls_with_text: whether the template writes the content of a message with calls.
        raw_calls: whether the template takes a ``tool`` message after a message without calls.
        free_arguments: whether arguments can be text that is no JSON object.
        tools: whether the template writes the record's tools.
        consecutive: whether the template takes two assistant messages in a row.
    """

    name: str
    template: str
    script: scripts.Script
    control: tuple[str, ...]
    words: tuple[str, ...] = ()
    bos: str | None = None
    eos: str
    stops: tuple[str, ...] | None = None
    ended_by_next: bool = False
    developer: bool = False
    reasoning: str | None = None
    inline_reasoning: bool = False
    calls: int = 0
    calls_with_text: bool = True
    raw_calls: bool = False
    free_arguments: bool = True
    tools: bool = False
    consecutive: bool = False

    def make(self, folder: Path) -> str:
        """Write the tokenizer folder and return its path."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
        from tokenizers import Regex as Pattern

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Pattern(_PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        special = [AddedToken(text, special=True, normalized=False) for text in self.control]
        trainer = trainers.BpeTrainer(
            vocab_size=300 + len(special),
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_LEARNED, trainer=trainer)
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.words])
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos, "bos_token": self.bos}
        (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        (folder / "chat_template.jinja").write_text(self.template)
        if self.stops is not None:
            ids = [tokenizer.token_to_id(text) for text in self.stops]
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return str(folder)

    def stop_behind(self, message: scripts.Message, following: scripts.Message | None) -> str:
        """Return the token that stops a turn and that the next role opens with; "" if the turn has its own."""
        if not self.ended_by_next:
            return ""
        to_tool = bool(message.get("tool_calls")) if following is None else following["role"] == "tool"
        return "<|observation|>" if to_tool else "<|user|>"

    def template_messages(self, messages: list[scripts.Message]) -> list[dict[str, Any]]:
        """Return messages as the raw template takes them."""
        renamed = {"reasoning": self.reasoning}
        return [{renamed.get(key) or key: value for key, value in message.items()} for message in messages]


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_GLM_CONTROL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM: dict[str, Any] = {
    "template": GLM, "script": scripts.glm, "control": _GLM_CONTROL, "words": (*_THINK, *_CALL),
    "eos": "<|endoftext|>", "ended_by_next": True, "reasoning": "reasoning_content", "inline_reasoning": True,
    "calls": 2, "raw_calls": True, "free_arguments": False, "tools": True,
}  # fmt: skip
_QWEN_TAKES: dict[str, Any] = {
    "control": _IM, "words": (*_THINK, *_CALL), "eos": "<|im_end|>", "reasoning": "reasoning_content",
    "inline_reasoning": True, "calls": 2, "raw_calls": True, "tools": True,
}  # fmt: skip

FAMILIES = [
    Family(
        name="chatml", template=CHATML, script=scripts.chatml, control=_IM, words=_CALL, eos="<|im_end|>",
        developer=True, calls=2, raw_calls=True, consecutive=True,
    ),
    Family(name="qwen3", template=QWEN3, script=scripts.qwen3, stops=("<|im_end|>", "<|endoftext|>"), **_QWEN_TAKES),
    Family(name="qwen3_thinking", template=QWEN3_THINKING, script=scripts.qwen3_thinking, **_QWEN_TAKES),
    Family(name="glm", **_GLM),
    Family(name="glm_listed", stops=("<|endoftext|>", "<|user|>", "<|observation|>"), **_GLM),
    Family(
        name="llama", template=LLAMA, script=scripts.llama,
        control=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                 "<|eot_id|>"),
        bos="<|begin_of_text|>", eos="<|eot_id|>", stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        developer=True, calls=1, calls_with_text=False, raw_calls=True, consecutive=True,
    ),
    Family(
        name="harmony", template=HARMONY, script=scripts.harmony,
        control=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"),
        eos="<|return|>", stops=("<|return|>", "<|endoftext|>", "<|call|>"),
        developer=True, reasoning="thinking", calls=1, calls_with_text=False, consecutive=True,
    ),
    Family(
        name="mistral", template=MISTRAL, script=scripts.mistral,
        control=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
                 "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        bos="<s>", eos="</s>", calls=2, calls_with_text=False, tools=True,
    ),
    Family(
        name="deepseek", template=DEEPSEEK, script=scripts.deepseek,
        control=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
                 "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                 "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        words=_THINK, bos="<｜begin▁of▁sentence｜>", eos="<｜end▁of▁sentence｜>", calls=2, raw_calls=True,
    ),
    Family(
        name="gemma", template=GEMMA, script=scripts.gemma,
        control=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<eos>",
    ),
    Family(
        name="phi", template=PHI, script=scripts.phi,
        control=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), eos="<|endoftext|>",
        consecutive=True,
    ),
    Family(
        name="kimi", template=KIMI, script=scripts.kimi,
        control=("[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                 "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                 "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        eos="[EOS]", stops=("<|im_end|>",), developer=True, calls=2, tools=True, consecutive=True,
    ),
    Family(
        name="vicuna", template=VICUNA, script=scripts.vicuna, control=("<s>", "</s>"), eos="</s>", consecutive=True,
    ),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
