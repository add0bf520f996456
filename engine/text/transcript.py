"""Token-exact prompts: the template's text around the ids that were really sampled.

Re-tokenising an answer does not give its sampled ids back, and one other id ends the cached prefix. So the text is
cut into runs, and only answers are replaced:

    <|im_start|>  assistant\\n  [ sampled ids ]  <|im_end|>  \\n  <|im_start|>  user\\nhi  <|im_end|>
    control       run           answer          control     run control       run        control
                  `-- text between control tokens that the template emitted, tokenised whole --'

Where an answer stands is read off a second render with marks around the contents. If the marks make the template
behave differently, they are not used, and the answer is text like any other.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import InvalidRequestError, TemplateError
from .answer_match import AnswerMatch, match_answer
from .escaping import Escaper, Marks, read_marks, split_escaped, unescape, with_marks
from .messages import ChatMessage, decoded_arguments, known_role
from .prompt_builder import PromptBuilder
from .run_memory import RunMemory
from .template import ChatTemplate, Message
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Rendered:
    token_ids: list[int]
    text: str
    """The prompt as a person may read it."""
    num_exact_answers: int = 0
    """Answers whose sampled ids were used."""
    continued_ids: tuple[int, ...] = ()
    """With `continue_final`: all ids at the end that stand for the last answer, sampled and, where it was cut within a
    token, tokenised. Empty if it has no ids of its own."""


class _Span(NamedTuple):
    """Where the answer of a message stands in the rendered text."""

    message_index: int
    start: int
    end: int
    """Of the answer without the white space at its ends."""
    outer_start: int
    outer_end: int
    """With the white space that belongs to the answer and not to the template."""


class Transcript:
    """Renders chats of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self._tokenizer = tokenizer
        self._template = template
        self._escaper = Escaper(tokenizer.special_tokens)
        # Templates look for `</think>` in answers and cut them there. It marks no turn, so an answer may hold it.
        tags = {text for text, token in tokenizer.special_tokens.items() if token.is_tag}
        self._answer_escaper = Escaper(tokenizer.special_tokens.keys() - tags)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        today: dt.date | None = None,
        memory: RunMemory | None = None,
    ) -> Rendered:
        """The prompt for the next answer, or with `continue_final` for the rest of the last one.

        `memory` knows answers that come without ids. Raises TemplateError, InvalidRequestError.
        """
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        head, final = list(messages), None
        if continue_final:
            head, final = head[:-1], head[-1]
            if known_role(final.role) != "assistant":
                raise InvalidRequestError("only an assistant message can be continued, and it must be last", "messages")
        render = _Render(self._template, self._escape_json(tools), self._escape_json(template_kwargs), today)
        contents = [self._escape(message) for message in head]
        page = self._render_marked(render, head, contents, add_generation_prompt or continue_final)
        end_space = _trailing_space(self._generation_prompt(render)) if head else ""
        spans = _find_answers(page, head, contents, end_space)
        if final is not None:
            content = self._escape(final)
            page, span = _append(page, len(head), content)
            spans.append(span)
            contents.append(content)

        builder = PromptBuilder(self._tokenizer, page.text, page.offsets, memory)
        num_exact = position = 0
        num_before_final: int | None = None
        for span in spans:
            builder.read(position, span.outer_start)
            position = span.outer_end
            match = self._match(messages[span.message_index], builder)
            if match is None:
                builder.read(span.outer_start, span.outer_end)
                continue
            num_exact += bool(match.token_ids)
            num_before = builder.put_ids(match.token_ids)
            if span.message_index == len(head):
                num_before_final = num_before
            if match.num_chars == 0:
                builder.put_text(page.text[min(span.outer_start + match.num_spaces, span.start) : span.end])
                position = span.end
            elif match.num_chars is not None:
                builder.put_text(split_escaped(page.text[span.start : span.end], match.num_chars)[1])
                position = span.end
        builder.read(position, len(page.text))
        ids = builder.finish()
        continued_ids = () if num_before_final is None else tuple(ids[num_before_final:])
        return Rendered(ids, unescape(page.text), num_exact, continued_ids)

    def _match(self, message: ChatMessage, builder: PromptBuilder) -> AnswerMatch | None:
        ids = builder.recall(message.content) if message.token_ids is None else message.token_ids
        return None if ids is None else match_answer(self._tokenizer, ids, message.content)

    def _escape(self, message: ChatMessage) -> str:
        is_answer = known_role(message.role) == "assistant"
        return (self._answer_escaper if is_answer else self._escaper).escape(message.content)

    def _escape_json(self, value: Any) -> Any:
        try:
            return self._escaper.escape_all(value)
        except RecursionError as error:
            raise InvalidRequestError("tools, tool calls or template arguments are nested too deeply") from error

    def _render_marked(
        self, render: _Render, messages: Sequence[ChatMessage], contents: Sequence[str], add_generation_prompt: bool
    ) -> Marks:
        """The text as it is without marks, and marks that do not change it: around as many contents as can be."""
        dicts = [self._to_dict(message, content) for message, content in zip(messages, contents, strict=True)]
        plain = render(dicts, add_generation_prompt)
        is_answer = [message["role"] == "assistant" for message in dicts]
        is_filled = [bool(content) for content in contents]
        # An empty answer of ours has a place too: what stands around it was not tokenised together.
        is_ours = [message.token_ids is not None for message in messages]
        choices = (
            [filled or ours for filled, ours in zip(is_filled, is_ours, strict=True)],
            is_filled,
            [filled and answer for filled, answer in zip(is_filled, is_answer, strict=True)],
        )
        for is_marked in choices:
            marked = [
                {**message, "content": with_marks(message["content"], index)} if is_marked[index] else message
                for index, message in enumerate(dicts)
            ]
            try:
                page = read_marks(render(marked, add_generation_prompt))
            except TemplateError:
                continue
            if page.text == plain:
                return page
        return Marks(plain, {}, {}, [])

    def _generation_prompt(self, render: _Render) -> str:
        try:
            return render([{"role": "user", "content": "x"}], True)
        except TemplateError:
            return ""

    def _to_dict(self, message: ChatMessage, content: str) -> Message:
        """What the template reads. No text of a client's reaches it unescaped."""
        fields: Message = {"role": known_role(message.role), "content": content}
        if message.tool_calls:
            as_text = self._template.wants_text_arguments
            calls = [decoded_arguments(call, as_text=as_text) for call in message.tool_calls]
            fields["tool_calls"] = self._escape_json(calls)
        for name in ("tool_call_id", "name"):
            value = getattr(message, name)
            if value is not None:
                fields[name] = self._escaper.escape(value)
        return fields


class _Render(NamedTuple):
    """The template with all that stays the same in one render."""

    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    today: dt.date | None

    def __call__(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
            today=self.today,
        )


def _find_answers(
    page: Marks, messages: Sequence[ChatMessage], contents: Sequence[str], prompt_space: str
) -> list[_Span]:
    """Answers that the template shows unchanged but for white space at their ends, in order.

    `prompt_space`: the white space that ends a prompt, before an answer is sampled. What white space stands before an
    answer beyond that is part of the answer, or was put there by the template in place of it.
    """
    spans: list[_Span] = []
    floor = 0
    for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
        if known_role(message.role) != "assistant":
            continue
        core = content.strip()
        start, end = page.starts.get(index), page.ends.get(index)
        # A template that cuts an answer in two and writes both parts has one of the marks left.
        start = end - len(core) if start is None and end is not None else start
        end = start + len(core) if end is None and start is not None else end
        if start is None or end is None or start < floor or page.text[start:end] != core:
            continue
        space = _trailing_space(page.text[floor:start])
        outer_start = start - (len(space) - len(prompt_space)) if space.startswith(prompt_space) else start
        own_space = content[len(content.rstrip()) :] if core else ""
        outer_end = end + len(own_space) if page.text.startswith(own_space, end) else end
        spans.append(_Span(index, start, end, outer_start, outer_end))
        floor = outer_end
    return spans


def _append(page: Marks, index: int, content: str) -> tuple[Marks, _Span]:
    """The answer to go on with, right after the prompt that it was sampled for."""
    core = content.strip()
    first = len(page.text)
    start = first + (content.index(core) if core else len(content))
    text = page.text + content
    span = _Span(index, start, start + len(core), first, len(text))
    return Marks(text, page.starts, page.ends, [*page.offsets, first]), span


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]
