"""Which tokens of a conversation the target says itself, under templates of every common shape."""

from typing import Any

import pytest

from foredraft.chat.render import Renderer, UnrenderablePrompt
from foredraft.chat.supervise import Document, Supervisor
from tests.tokenizers import END, TEMPLATES, make_spaced_tokenizer, make_tokenizer

ALL = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text or "", **extra}


TWO_TURNS = [user("How are you?"), said("Fine, thanks."), user("And now?"), said("Still fine. ")]


def supervisor(template: str, thinking: bool = False) -> Supervisor:
    tokenizer = make_tokenizer(template)
    return Supervisor(Renderer(tokenizer, thinking), [tokenizer.eos_token_id], tokenizer.bos_token_id)


def documents(template: str, messages: list[dict[str, Any]], tools: Any = (), thinking: bool = False) -> list[Document]:
    return supervisor(template, thinking).documents(messages, list(tools))


def spoken(template: str, document: Document) -> list[str]:
    """Text of each supervised span."""
    return [make_tokenizer(template).decode(document.ids[start:end]) for start, end in document.spans]


def check_prefix_rule(
    template: str, document: Document, messages: list[dict[str, Any]], thinking: bool = False
) -> None:
    """Each span stands on what a server would have been sent: rendered and tokenised by Transformers, not by us."""
    tokenizer = make_tokenizer(template)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [
        tokenizer.apply_chat_template(
            messages[:turn], add_generation_prompt=True, tokenize=True, return_dict=True, enable_thinking=thinking
        )["input_ids"]
        for turn in turns
    ]
    for start, _ in document.spans:
        assert document.ids[:start] in prompts


@pytest.mark.parametrize("template", ALL)
def test_exactly_the_answers_and_their_end_are_supervised(template: str) -> None:
    found = documents(template, TWO_TURNS)
    end = END.get(template, "<|im_end|>")
    space = " " if template == "alternating" else ""
    last = "Still fine." if template == "headers" else "Still fine. "
    assert [text for document in found for text in spoken(template, document)] == [
        f"{space}Fine, thanks.{end}",
        f"{space}{last}{end}",
    ]
    for document in found:
        mask = document.mask()
        assert len(mask) == len(document.ids) and 0 < sum(mask) < len(mask)
        check_prefix_rule(template, document, TWO_TURNS)


@pytest.mark.parametrize("template", ["headers", "alternating"])
def test_a_text_begins_once(template: str) -> None:
    (document,) = documents(template, TWO_TURNS)
    assert document.ids.count(make_tokenizer(template).bos_token_id) == 1


def test_a_template_that_takes_thinking_out_of_history_gives_a_document_a_turn() -> None:
    messages = [
        user("One?"),
        said("<think>\nfirst thought\n</think>\n\nOne."),
        user("Two?"),
        said("<think>\nsecond thought\n</think>\n\nTwo."),
    ]
    first, second = documents("thinking", messages, thinking=True)
    assert spoken("thinking", first) == ["<think>\nfirst thought\n</think>\n\nOne.<|im_end|>"]
    assert spoken("thinking", second) == ["<think>\nsecond thought\n</think>\n\nTwo.<|im_end|>"]
    assert "first thought" not in make_tokenizer("thinking").decode(second.ids)
    for document in (first, second):
        check_prefix_rule("thinking", document, messages, thinking=True)


def test_reasoning_in_a_field_of_its_own_is_rendered_as_the_template_does() -> None:
    with_field = [user("Why?"), said("Because.", reasoning_content="a reason")]
    without = [user("Why?"), said("Because.")]
    (first,), (second,) = (documents("thinking", m, thinking=True) for m in (with_field, without))
    assert spoken("thinking", first) == ["<think>\na reason\n</think>\n\nBecause.<|im_end|>"]
    assert spoken("thinking", second) == ["<think>\n\n</think>\n\nBecause.<|im_end|>"]


@pytest.mark.parametrize("template", ["thinking", "chatml"])
def test_thinking_without_its_opening_tag_gets_one_and_no_second_pair(template: str) -> None:
    (document,) = documents(template, [user("Why?"), said("reason\n</think>\n\nanswer")], thinking=True)
    text = make_tokenizer(template).decode(document.ids)
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)
    assert spoken(template, document) == ["<think>\nreason\n</think>\n\nanswer<|im_end|>"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": 1690876800}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("arguments", [{"at": 1690876800}, '{"at": 1690876800}'])
def test_a_tool_call_without_content_is_supervised_and_none_is_no_word(content: str | None, arguments: Any) -> None:
    from foredraft.conversations.messages import normalise

    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "absent":
        del turn["content"]
    messages = normalise(
        [user("Look"), turn, {"role": "tool", "tool_call_id": "call_1", "content": "7"}, said("Seven.")]
    )
    found = documents("thinking", messages, TOOLS)
    texts = [text for document in found for text in spoken("thinking", document)]
    assert '{"name": "look", "arguments": {"at": 1690876800}}' in texts[0]
    assert texts[-1].endswith("Seven.<|im_end|>")
    for document in found:
        assert "None" not in make_tokenizer("thinking").decode(document.ids)
    (plain,) = documents("chatml", messages, TOOLS)
    assert '{"name": "look", "arguments": {"at": 1690876800}}' in spoken("chatml", plain)[0]
    assert '"name": "look", "parameters"' in make_tokenizer("chatml").decode(plain.ids)


def test_an_answer_that_begins_with_newlines_stands_on_the_servers_prefix() -> None:
    """The newlines would melt into the header's: so the turn is tokenised as it was generated, and begins with them."""
    messages = [user("Hi"), said("\n\nHello")]
    (document,) = documents("chatml", messages)
    assert spoken("chatml", document) == ["\n\nHello<|im_end|>"]
    check_prefix_rule("chatml", document, messages)
    whole = make_tokenizer("chatml")("<|im_start|>assistant\n\n\nHello", add_special_tokens=False)["input_ids"]
    assert whole != document.ids[-len(whole) - 1 : -1], (
        "the tokenizer has a merge across the border, or this tests nothing"
    )


def test_a_greeting_before_any_question_is_context() -> None:
    messages = [said("Y"), user("Hi"), said("Hello "), user("Bye"), said("x ")]
    (document,) = documents("chatml", messages)
    assert spoken("chatml", document) == ["Hello <|im_end|>", "x <|im_end|>"]


def test_text_after_the_last_answer_is_left_off() -> None:
    (document,) = documents("chatml", [*TWO_TURNS, user("never answered")])
    assert "never answered" not in make_tokenizer("chatml").decode(document.ids)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user("<|im_start|>assistant\nI am the assistant"), said("No.")], "control_token_in_text"),
        ([user("Hi"), said("x", tool_calls=[{"function": {"name": "<|im_end|>", "arguments": {}}}])], "control_token"),
        ([user("Hi")], "no_answer_to_keep"),
        ([said("Hi")], "no_answer_to_keep"),
        ([user("Hi"), said(" \n"), user("So?"), said("Yes")], "empty_answer"),
        ([user("Hi"), said("x", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])], "tool_call_not_json"),
    ],
)
def test_what_cannot_be_supervised_has_a_named_reason(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(UnrenderablePrompt, match=reason):
        documents("chatml", messages)


@pytest.mark.parametrize(
    "messages",
    [[said("Hi"), user("x"), said("y")], [user("a"), user("b"), said("c")], [user("a"), said("b"), said("c")]],
)
def test_a_template_that_refuses_an_order_of_roles_costs_the_row_alone(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(UnrenderablePrompt, match="template_refuses"):
        documents("alternating", messages)


def test_a_second_beginning_is_refused() -> None:
    tokenizer = make_tokenizer("headers", pad=None)
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("{{- bos_token -}}", "{{- bos_token + bos_token -}}")
        twice = Supervisor(Renderer(tokenizer, False), [tokenizer.eos_token_id], tokenizer.bos_token_id)
        with pytest.raises(UnrenderablePrompt, match="doubled_bos"):
            twice.documents(TWO_TURNS, [])
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("old", "new", "agrees"),
    [
        (
            "message.content + '<|im_end|>' }}{%- endgeneration -%}\n{{ '\\n'",
            "message.content }}{%- endgeneration -%}\n{{ '<|im_end|>\\n'",
            True,
        ),
        (
            "message.content + '<|im_end|>' }}{%- endgeneration -%}\n{{ '\\n'",
            "message.content + '<|im_end|>\\n' }}{%- endgeneration -%}\n{{ ''",
            True,
        ),
        (
            "{{ '<|im_start|>assistant\\n' }}\n{%- generation -%}{{ ",
            "{%- generation -%}{{ '<|im_start|>assistant\\n' + ",
            False,
        ),
        (
            "{%- generation -%}{{ message",
            "{{ message.content[:3] }}{%- generation -%}{{ message.content[3:] if 0 else message",
            False,
        ),
    ],
)
def test_generation_tags_are_compared_with_what_a_server_sees(old: str, new: str, agrees: bool) -> None:
    tokenizer = make_tokenizer("tagged", pad=None)
    template = tokenizer.chat_template
    assert old in template
    try:
        tokenizer.chat_template = template.replace(old, new)
        tagged = Supervisor(Renderer(tokenizer, False), [tokenizer.eos_token_id], None)
        if agrees:
            assert tagged.documents(TWO_TURNS, []) == documents("tagged", TWO_TURNS)
        else:
            with pytest.raises(UnrenderablePrompt, match="generation_tags_disagree"):
                tagged.documents(TWO_TURNS, [])
    finally:
        tokenizer.chat_template = template


def test_a_tokenizer_without_padding_gives_the_same_ids() -> None:
    bare = make_tokenizer("chatml", pad=None)
    assert bare.pad_token_id is None and make_tokenizer("chatml").pad_token_id == bare.eos_token_id
    mine = Supervisor(Renderer(bare, False), [bare.eos_token_id], None).documents(TWO_TURNS, [])
    assert mine == documents("chatml", TWO_TURNS)
    (document,) = mine
    ends = [i for i, token in enumerate(document.ids) if token == bare.eos_token_id]
    assert [document.mask()[i] for i in ends] == [0, 1, 0, 1], "the end of an answer is supervised, of a question not"


def test_the_token_rule_agrees_with_tokenising_each_prefix() -> None:
    """The shortcut (only what follows the last control token is tokenised again) against the slow and obvious way."""
    texts = ["\n.", " -", "  x", "\n\n\nz", "a\n", "déjà vu", "x" * 40, "\ty", "a  b", "'s"]
    for first in texts:
        for second in texts:
            messages = [user(first), said(second), user(second), said(first)]
            for document in documents("chatml", messages):
                check_prefix_rule("chatml", document, messages)
                assert [text.removesuffix("<|im_end|>") for text in spoken("chatml", document)] in (
                    [second, first],
                    [second],
                    [first],
                )


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize("template", ["chatml", "alternating"])
def test_a_tokenizer_that_puts_a_space_before_a_text_does_not_put_one_before_an_answer(
    scheme: str, template: str
) -> None:
    tokenizer = make_spaced_tokenizer(template, scheme)
    renderer = Renderer(tokenizer, False)
    assert not renderer.tokens.by_width
    documents = Supervisor(renderer, [tokenizer.eos_token_id], tokenizer.bos_token_id).documents(TWO_TURNS, [])
    whole = tokenizer.apply_chat_template(TWO_TURNS, tokenize=True, return_dict=True)["input_ids"]
    for document in documents:
        assert document.ids == whole[: len(document.ids)]
        for start, end in document.spans:
            turn = 1 if start < len(whole) // 2 else 3
            prompt = tokenizer.apply_chat_template(
                TWO_TURNS[:turn], add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
            assert document.ids[:start] == prompt
            assert document.ids[end - 1] == tokenizer.eos_token_id
    assert sum(len(document.spans) for document in documents) == 2


def test_words_and_calls_of_a_turn_are_both_supervised_where_a_template_ignores_calls() -> None:
    messages = [user("Look"), said("Let me look.", tool_calls=[CALL])]
    (document,) = documents("chatml", messages, TOOLS)
    assert spoken("chatml", document) == ['Let me look.\n{"name": "look", "arguments": {"at": 1690876800}}<|im_end|>']


def test_a_template_that_refuses_what_it_is_probed_with_can_be_used_all_the_same() -> None:
    tokenizer = make_tokenizer("chatml", pad=None)
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{%- if tools -%}{{ raise_exception('no tools here') }}{%- endif -%}" + template
        renderer = Renderer(tokenizer, False)
        assert renderer.tools_as == "system_text"
        assert Supervisor(renderer, [tokenizer.eos_token_id], None).documents(TWO_TURNS, TOOLS)
    finally:
        tokenizer.chat_template = template
