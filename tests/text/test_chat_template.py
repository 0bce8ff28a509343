"""Chat templates: the same text as transformers makes, and no way out of the sandbox."""

import copy
import json
from datetime import datetime

import pytest
from helpers import tiny_tokenizer
from jinja2 import Environment, TemplateError
from jinja2.ext import loopcontrols
from transformers import AutoTokenizer

from nanopage.text.template_process import create_environment
from nanopage.text.tokenizer import Tokenizer
from nanopage.text.tool_prompt import render_chat
from nanopage.weights.hub import default_model

USER = {"role": "user", "content": "Hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
NAN = float("nan")


def call_with(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(default_model())


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(default_model())


def turns(*contents: str, system: str | None = None) -> list[dict]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


CONVERSATIONS = {
    "one turn": turns("Hello"),
    "system": turns("Hello", system="Be brief."),
    "many turns": turns("Hi", "Hello!", "How are you?", "Fine.", "Good"),
    "system and turns": turns("1 + 1?", "2", "And 2 + 2?", system="You are a calculator."),
    "unicode": turns("👩‍👩‍👧‍👦 e\u0301 你好 🇸🇪", "ﷺ 𝔘 क्षि", "\u200d\ufffd\u2028"),
    "odd text": turns("  <b>&amp;</b> \"quotes\" 'more' {{ 1 }} {% raw %} \\n \t\n\n", "", "<|im_end|>\r\n"),
    "a reply to go on from": turns("Hi", "Hel"),
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_default_model_gets_the_text_of_transformers(tokenizer, reference, name, add_generation_prompt):
    messages = CONVERSATIONS[name]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert messages[-1]["content"] in text
    ids = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


TEMPLATES = {
    "llama 3": """\
{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + \
message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}\
{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "llama 3.1": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("at %%") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\n\n'+ message['content'] | trim + eos_token }}
{%- endfor %}""",
    "qwen 2.5": """\
{%- if tools %}
    {{- 'tools' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or \
(message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "qwen 3": """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and \
not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning = '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ reasoning ~ content ~ '<|im_end|>\\n' }}
    {{- 'last' if loop.index0 == ns.last_query_index }}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>' }}
{%- endif %}""",
    "mistral": """\
{{ bos_token }}{% for message in messages if message['role'] != 'system' %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "gemma": """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{'<start_of_turn>model\n'}}
{% endif %}
""",
    "loop controls": """\
{% for message in messages %}
    {% if loop.index0 == 3 %}{% break %}{% endif %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {{ message.content }}
{% endfor %}
""",
    "tojson": """\
{{ messages | tojson }}
{{ messages[0] | tojson(indent=2) }}{{ {'b': 1, 'a': none, 'é': '<&>'} | tojson(sort_keys=true) }}
{{ ['é', '"'] | tojson(ensure_ascii=true, separators=(',', ':')) }}""",
    "loop variables": """\
{% for role, content in messages | map('items') | map('map', 'last') | map('list') %}
{{ loop.index }} {{ loop.revindex }} {{ loop.revindex0 }} {{ loop.length }} {{ loop.first }} {{ loop.last }}
{{ loop.previtem }} {{ loop.nextitem }} {{ loop.cycle('odd', 'even') }} {{ loop.changed(role) }} {{ loop.depth }}
{% endfor %}
{% for message in messages if message.role == 'nobody' %}x{% else %}nobody{% endfor %}
{% for key in messages[0] %}{{ key }}{% endfor %}
{% for item in [1, [2, [3, 4]], 5] recursive %}{{ loop(item) if item is iterable else item }}{% endfor %}
{% for a in range(4) %}{% for b in range(a) %}{{ a }}{{ b }}{{ loop.last }}{% endfor %}{% endfor %}
{% for x in missing %}x{% else %}none{% endfor %}
""",
    "namespace": """\
{% set ns = namespace(count=0, names=[]) %}
{% for message in messages %}{% set ns.count = ns.count + 1 %}{% set ns.names = ns.names + [message.role] %}{% endfor %}
{{ ns.count }} {{ ns.names | join(', ') }} {{ ns.names | unique | list | length }}""",
    "macros and filters": """\
{%- macro turn(message, end='') -%}
    {{ message['role'] | upper }}: {{ message['content'] | trim | replace('e', 'E') }}{{ end }}
{%- endmacro -%}
{%- for message in messages | selectattr('role', 'ne', 'system') -%}
    {{ turn(message, end=eos_token) }}
{% endfor -%}
{{ messages | map(attribute='content') | map('length') | sum }} {{ '-' * 10 }} {{ '%s and %d' % ('x', 7) }}
{{ 'a{}b{x}'.format(1, x=2) }} {{ messages | rejectattr('role', 'equalto', 'user') | list | length }}""",
    "formats": """\
{{ '**%s** 10%%' % 'x' }} {{ '%d, %5.2f' % (5, 1.5) }} {{ '**%s**' | format('x') }} {{ ('%20000d' % 1) | length }}
{{ '{{"name": "{}"}}'.format('x') }} {{ '{:>5}|{a:.2f}|{:20000}'.format(1, 2, a=2.5) | length }}
{{ '{a}'.format_map({'a': 1}) }}
{{ messages | tojson }}""",
    "numbers": """\
{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ -7 / 2 }} {{ 2 ** 64 * 2 ** 64 }} {{ messages | length ** 2 }}""",
    "variables": """\
{{ tools is defined }} {{ tools is none }} {{ documents is none }} {{ other is defined }}
{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }} {{ add_generation_prompt }}""",
    "generation": """\
{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}
{% generation %}{% set inner = messages %}{{ inner | length }}{% endgeneration %}{{ inner is defined }}""",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_well_known_templates_give_the_text_of_transformers(tokenizer, reference, template):
    source, texts = TEMPLATES[template], set()
    for messages in CONVERSATIONS.values():
        for add_generation_prompt in (True, False):
            text = tokenizer.apply_chat_template(messages, source, add_generation_prompt)
            assert text == reference.apply_chat_template(
                messages, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            texts.add(text)
    assert len(texts) > 1


def test_a_template_may_take_many_steps(tokenizer):
    source = "{% for a in range(400) %}{% for b in range(400) %}{% endfor %}{% endfor %}{{ messages | length }}"
    assert tokenizer.apply_chat_template([USER], source) == "1"


def test_a_template_can_refuse_a_conversation(tokenizer, reference):
    messages = [USER, USER]
    with pytest.raises(TemplateError, match="roles must alternate"):
        reference.apply_chat_template(messages, chat_template=TEMPLATES["mistral"], tokenize=False)
    with pytest.raises(ValueError, match="the chat template failed: Conversation roles must alternate"):
        tokenizer.apply_chat_template(messages, TEMPLATES["mistral"])


def test_the_date_is_todays(tokenizer):
    form = "%Y-%m-%d %H:%M:%S"
    before = datetime.now().strftime(form)
    text = tokenizer.apply_chat_template([USER], "{{ strftime_now('" + form + "') }}")
    assert before <= text <= datetime.now().strftime(form)


def test_long_conversations_are_within_the_limits(tokenizer, reference):
    messages = turns(*(f"message {i}" for i in range(3001)))
    for source in (None, TEMPLATES["qwen 3"], TEMPLATES["mistral"]):
        text = tokenizer.apply_chat_template(messages, source)
        assert text == reference.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize("template", ["llama 3", "qwen 2.5", "qwen 3", "gemma"])
def test_a_message_of_millions_of_letters_is_within_the_limits(tokenizer, template):
    letters = "ab" * 1_500_000
    assert letters in tokenizer.apply_chat_template([{"role": "user", "content": letters}], TEMPLATES[template])


def test_rendering_changes_neither_the_messages_nor_the_next_rendering(tokenizer):
    messages, source = turns("a", "b", system="c"), TEMPLATES["namespace"]
    before = copy.deepcopy(messages)
    assert tokenizer.apply_chat_template(messages, source) == tokenizer.apply_chat_template(messages, source)
    assert messages == before


# Where the template comes from


def model_directory(tmp_path, jinja=None, **config):
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "jinja, config, text",
    [
        ("file é", {}, "file é"),
        (None, {"chat_template": "config"}, "config"),
        ("file", {"chat_template": "config"}, "file"),
        (
            None,
            {"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "named"}]},
            "named",
        ),
        (None, {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<B>"}}, "<B>"),
        (None, {"chat_template": "[{{ bos_token }}]", "bos_token": None}, "[]"),
    ],
)
def test_the_template_is_the_models_own(tmp_path, tokenizer, jinja, config, text):
    assert model_directory(tmp_path, jinja, **config).apply_chat_template([USER]) == text


LISTED = [{"name": name, "template": f"list: {name}"} for name in ("default", "tool_use", "rag")]


@pytest.mark.parametrize(
    "listed, files",
    [
        (LISTED, {}),
        (LISTED[1:], {}),
        ("one", {}),
        (None, {"chat_template": "file", "additional_chat_templates/tool_use": "file: tool_use"}),
        (LISTED, {"chat_template": "file"}),
        (LISTED, {"chat_template": "file", "additional_chat_templates/rag": "file: rag"}),
        (LISTED, {"additional_chat_templates/tool_use": "file: tool_use"}),
    ],
)
def test_the_template_is_the_one_that_transformers_chooses(tmp_path, tokenizer, listed, files):
    (tmp_path / "additional_chat_templates").mkdir()
    for name, source in files.items():
        (tmp_path / f"{name}.jinja").write_text(source)
    ours = model_directory(tmp_path, tokenizer_class="PreTrainedTokenizerFast", chat_template=listed)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, [], TOOLS):
        for chosen in (None, "rag", "tool_use", "source"):
            try:
                expected = theirs.apply_chat_template([USER], tokenize=False, tools=tools, chat_template=chosen)
            except ValueError:
                with pytest.raises(ValueError, match="no default chat template"):
                    ours.apply_chat_template([USER], tools=tools)
                continue
            if not tools:
                assert ours.apply_chat_template([USER], tools=tools, chat_template=chosen) == expected
            assert render_chat(ours, [USER], tools, chat_template=chosen) == expected


def test_a_model_without_a_default_template_names_those_that_it_has(tmp_path, tokenizer):
    ours = model_directory(tmp_path, chat_template=LISTED[1:])
    with pytest.raises(ValueError, match="choose one by its name, of 'tool_use', 'rag'"):
        ours.apply_chat_template([USER])


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": {"default": "x"}},
        {"chat_template": ["x"]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": [{"name": "default", "template": None}]},
    ],
)
def test_a_chat_template_of_the_wrong_form_is_an_error_that_names_the_file(tmp_path, tokenizer, config):
    with pytest.raises(ValueError, match=r"chat_template in .*tokenizer_config.json must be a string or a list"):
        model_directory(tmp_path, **config)


def test_a_chat_template_that_is_not_utf_8_is_an_error_that_names_the_file(tmp_path, tokenizer):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8"):
        model_directory(tmp_path)


@pytest.mark.parametrize("config", [{}, {"chat_template": None}])
def test_without_a_template_the_error_says_it_is_a_base_model(tmp_path, tokenizer, config):
    base = model_directory(tmp_path, **config)
    with pytest.raises(ValueError, match="no chat template, so it is probably a base model"):
        base.apply_chat_template([USER])
    assert base.apply_chat_template([USER], "{{ messages[0].content }}") == "Hello"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": 1', '"{\\"a\\": 1"'),
        ("[1]", "[1]"),
        ("5", "5"),
        ('"a"', '"\\"a\\""'),
        ('{"a": "\\ud83d"}', '"{\\"a\\": \\"\\\\ud83d\\"}"'),
        ([1], "[1]"),
        (None, "{}"),
        ("null", "{}"),
        (" ", "{}"),
        ('{"a": 1}', '{"a": 1}'),
    ],
)
def test_arguments_are_what_the_model_wrote_or_nothing_where_an_object_is_needed(tokenizer, arguments, text):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    function = "messages[0].tool_calls[0].function"
    assert tokenizer.render_chat([message], "{{ " + function + ".arguments | tojson }}") == text
    objects_only = "{% for name, value in " + function + ".arguments | items %}{{ name }}{% endfor %}."
    assert tokenizer.render_chat([message], objects_only) == ("a." if arguments == '{"a": 1}' else ".")
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    written = arguments if isinstance(arguments, str) and text.startswith('"') else text
    assert f'"arguments": {written}}}\n</tool_call>' in render_chat(tokenizer, [message], chat_template=plain)


def test_calls_are_not_continued(tokenizer):
    message = {"role": "assistant", "content": "I", "tool_calls": [CALL]}
    for template in ("{{ messages[-1].content }}", "{{ messages[-1].content }}{{ tools }}"):
        options = {"chat_template": template, "add_generation_prompt": False, "continue_final_message": True}
        with pytest.raises(ValueError, match="tool_calls"):
            render_chat(tokenizer, [USER, message], **options)


@pytest.mark.parametrize(
    "messages, error, named",
    [
        ([], ValueError, "messages must be a list"),
        ("Hello", ValueError, "messages must be a list"),
        (USER, ValueError, "messages must be a list"),
        (None, ValueError, "messages must be a list"),
        (["Hello"], TypeError, "messages[0] must be a dict, not 'Hello'"),
        ([["Hello" * 10**6]], TypeError, "messages[0] must be a dict, not ['HelloHello"),
        ([10**5000], TypeError, "messages[0] must be a dict, not int"),
        ([USER, None], TypeError, "messages[1] must be a dict"),
        ([{"content": "x"}], TypeError, "messages[0]['role'] must be a string, not None"),
        ([USER, {"role": "user"}], TypeError, "messages[1]['content'] must be a string, not None"),
        ([USER, USER, {"role": 5, "content": "x"}], TypeError, "messages[2]['role'] must be a string, not 5"),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "[0]['content'][0]['text'] must be a string"),
        ([{"role": "user", "content": ["x", 5]}], TypeError, "messages[0]['content'][1] must be a string, not 5"),
        ([USER, {**USER, "audio": None, "refusal": "x"}], ValueError, "messages[1] has fields"),
        ([USER, {**USER, "audio": None, "refusal": "x"}], ValueError, "'audio', 'refusal'"),
        ([{**USER, "name": 5}], TypeError, "messages[0]['name'] must be a string, not 5"),
        ([{**USER, "tool_calls": [CALL]}], ValueError, "['tool_calls'] needs the role 'assistant', not 'user'"),
        ([{"role": "assistant", "tool_calls": "f"}], TypeError, "['tool_calls'] must be a list, not 'f'"),
        ([{"role": "assistant", "tool_calls": [5]}], TypeError, "['tool_calls'][0] must be {'function': "),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], TypeError, "[0] must be {'function': "),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": {1, 2}}]}], TypeError, "[0] must be plain JSON"),
        ([call_with({"x": NAN})], TypeError, "['tool_calls'][0] must be plain JSON"),
        ([call_with({"x": "\ud83d"})], ValueError, "['tool_calls'][0] has a lone surrogate"),
        ([{**USER, **{"x" * 10**6 + str(i): 1 for i in range(9)}}], ValueError, "messages[0] has fields"),
        ([{"role": "user", "content": [{"text": "x" * 10**6}] * 99}], ValueError, "messages[0]['content'][0] is of"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            ValueError,
            "[0] is of type 'image_url', which is not",
        ),
        ([USER, {"role": "a\udfff", "content": ""}], ValueError, "messages[1]['role'] has a lone surrogate at"),
        ([{"role": "user", "content": "é\ud83dx"}], ValueError, "['content'] has a lone surrogate at character 1"),
    ],
)
def test_malformed_messages_are_named_by_index_and_field(tokenizer, messages, error, named):
    with pytest.raises(error) as raised:
        tokenizer.apply_chat_template(messages)
    assert named in str(raised.value)
    assert len(str(raised.value)) < 400


def test_arguments_of_the_wrong_type_are_named(tokenizer):
    with pytest.raises(TypeError, match="chat_template must be a string of Jinja source, not 5"):
        tokenizer.apply_chat_template([USER], 5)
    with pytest.raises(TypeError, match="add_generation_prompt must be True or False, not 'no'"):
        tokenizer.apply_chat_template([USER], add_generation_prompt="no")


# Tools, text parts, more variables, and messages to go on with

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "é <&>", "parameters": {"type": "object", "properties": {}}},
    }
]
WITH_TOOLS = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
[{{ m.role }}{{ ' ' + m.name if m.name }}{{ ' for ' + m.tool_call_id if m.tool_call_id }}]
{{- m.content if m.content is string else 'no string' }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<no thinking>{% endif %}"""
TOOL_CONVERSATION = [
    {"role": "user", "content": "Is it cold?", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5 degrees", "tool_call_id": "1"},
    {"role": "assistant", "content": "Yes.", "tool_calls": []},
]


@pytest.mark.parametrize("enable_thinking", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_tools_and_their_calls_give_the_text_of_transformers(tokenizer, reference, enable_thinking):
    parsed = copy.deepcopy(TOOL_CONVERSATION)  # transformers leaves it to its callers, such as vLLM, to do this
    parsed[1]["content"] = ""
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo"}
    expected = reference.apply_chat_template(
        parsed, chat_template=WITH_TOOLS, tokenize=False, tools=TOOLS, **enable_thinking
    )
    before = copy.deepcopy(TOOL_CONVERSATION)
    for messages in (TOOL_CONVERSATION, parsed):
        text = tokenizer.apply_chat_template(messages, WITH_TOOLS, False, tools=TOOLS, **enable_thinking)
        assert text == expected
    assert '<weather {"city": "Oslo"}>' in text and "[user ann]" in text
    assert before == TOOL_CONVERSATION


def test_text_parts_are_joined_by_newlines(tokenizer):
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}]
    joined = tokenizer.apply_chat_template([{"role": "user", "content": "a\nb\n"}])
    assert tokenizer.apply_chat_template([{"role": "user", "content": parts}]) == joined


def test_a_call_without_arguments_has_none(tokenizer):
    for arguments in ("", None, {}, "{}"):
        assert tokenizer.apply_chat_template([call_with(arguments)], WITH_TOOLS).endswith("<weather {}>")


@pytest.mark.parametrize("template", [None, "llama 3", "gemma"])
@pytest.mark.parametrize("content", ["Hel", "Hel ", "1.\n", "", " a"])
def test_a_message_to_go_on_with_is_left_open_as_in_transformers(tokenizer, reference, template, content):
    messages = turns("Hi", content)
    expected = reference.apply_chat_template(
        messages,
        chat_template=template and TEMPLATES[template],
        tokenize=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    text = tokenizer.apply_chat_template(
        messages, template and TEMPLATES[template], add_generation_prompt=False, continue_final_message=True
    )
    assert text == expected
    assert text.rstrip().endswith(content.strip())


def test_a_message_cannot_be_left_open_and_answered(tokenizer):
    with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
        tokenizer.apply_chat_template([USER], continue_final_message=True)
    with pytest.raises(ValueError, match="does not work with this chat template"):
        tokenizer.apply_chat_template([USER], "{{ messages[0].role }}", False, continue_final_message=True)
    with pytest.raises(TypeError, match="continue_final_message must be True or False, not 1"):
        tokenizer.apply_chat_template([USER], continue_final_message=1)


@pytest.mark.parametrize(
    "options, error, named",
    [
        ({"tools": "weather"}, TypeError, "tools must be a list of JSON schemas, not 'weather'"),
        ({"tools": [print]}, TypeError, "tools[0] must be a dict, not <built-in function print>"),
        ({"tools": [{"a": print}]}, TypeError, "tools[0] must be plain JSON"),
        ({"tools": [{"a": NAN}]}, TypeError, "tools[0] must be plain JSON"),
        ({"tools": [{"a": "\ud83d"}]}, ValueError, "tools[0] has a lone surrogate"),
        ({"tools": [{"a": 1}]}, ValueError, "the chat template does not read tools"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ValueError, "does not read enable_thinking"),
        ({"chat_template_kwargs": {"bos_token": print}}, TypeError, "chat_template_kwargs must be plain JSON"),
        ({"chat_template_kwargs": {"messages": []}}, ValueError, "chat_template_kwargs has messages: that is"),
        ({"chat_template_kwargs": [1]}, TypeError, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {1: 2}}, TypeError, "chat_template_kwargs must be a dict"),
    ],
)
def test_what_cannot_cross_to_the_template_is_named(tokenizer, options, error, named):
    with pytest.raises(error) as raised:
        tokenizer.render_chat([USER], "{{ bos_token }}", **options)
    assert named in str(raised.value)


def test_a_name_that_only_occurs_in_a_template_is_not_read(tokenizer):
    template = "{% set named = 1 %}{# thinking #}You are thinking of tools.{{ ' Yes.' if enable_thinking }}"
    for options in ({"tools": [{"a": 1}]}, *({"chat_template_kwargs": {name: 1}} for name in ("name", "thinking"))):
        with pytest.raises(ValueError, match="the chat template does not read"):
            tokenizer.render_chat([USER], template, **options)
    text = tokenizer.render_chat([USER], template, chat_template_kwargs={"enable_thinking": True})
    assert text == "You are thinking of tools. Yes."
    maybe = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"  # as in Llama 3.1's
    assert tokenizer.render_chat([USER], maybe, tools=[{"a": 1}]) == "[{'a': 1}]"


BROKEN = {
    "unknown tag": "{% nonsense %}",
    "unclosed loop": "{% for message in messages %}",
    "unclosed expression": "{{ messages",
    "unknown filter": "{{ messages | nonsense }}",
    "unknown test": "{{ messages is nonsense }}",
    "undefined attribute": "{{ nothing.at_all.here }}",
    "wrong types": "{{ messages + 1 }}",
    "not callable": "{{ messages() }}",
    "not JSON": "{{ nothing | tojson }}",
    "division by zero": "{{ 1 / 0 }}",
    "missing key": "{{ '%(a)s' % {} }}",
    "missing index": "{{ '{1}'.format(2) }}",
    "not found": "{{ 'a'.index('b') }}",
    "too deep an expression": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "too deep for Python's parser": "{{ " + "- " * 150 + "messages | length }}",
    "too many nested loops": "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    "too many nested conditions": "{% if messages %}" * 120 + "{% endif %}" * 120,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_a_value_error(tokenizer, name):
    with pytest.raises(ValueError, match="the chat template failed"):
        tokenizer.apply_chat_template([USER], BROKEN[name])


# Attempts to get out

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'].__base__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__')|attr('__mro__') }}",
    "{{ (''|attr('\\x5f\\x5fclass\\x5f\\x5f')) }}",
    "{{ messages.__class__ }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|groupby('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{a.__class__.__mro__}'.format(a=1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{% set f = ['{0.__class__}'.format] %}{{ f[0](1) }}",
    "{{ namespace(f='{0.__class__}'.format).f(1) }}",
    "{{ dict(f='{0.__class__}'.format)['f'](1) }}",
    "{{ '{0.__init__.__globals__[os]}'.format(cycler) }}",
    "{{ cycler.__init__.__globals__.os.popen('cat SECRET; touch CREATED').read() }}",
    "{{ cycler.__init__.__globals__['os']['popen']('cat SECRET; touch CREATED')['read']() }}",
    "{{ joiner.__init__.__globals__.os.popen('cat SECRET; touch CREATED').read() }}",
    "{{ namespace.__init__.__globals__.os.popen('cat SECRET; touch CREATED').read() }}",
    "{{ lipsum.__globals__.os.popen('cat SECRET; touch CREATED').read() }}",
    "{{ lipsum.__globals__['__builtins__'].open('SECRET').read() }}",
    "{{ (lipsum|attr('__globals__'))['os'].popen('cat SECRET; touch CREATED').read() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('cat SECRET; touch CREATED').read() }}",
    "{{ self._TemplateReference__context.environment }}{{ self.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ strftime_now.__globals__.__builtins__.open('SECRET').read() }}",
    "{{ strftime_now.__globals__['__builtins__']['open']('CREATED', 'w') }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{{ (messages|map('upper')).gi_code }}",
    "{{ loop.__class__ }}{% for x in messages %}{{ loop._iterator.__class__ }}{{ loop.__class__ }}{% endfor %}",
    "{{ messages.append.__self__.__class__ }}",
    "{{ ''.join.__class__ }}",
]
LEAKS = ("<class", "<module", "<function", "<code", "<frame", "<_io", "class '", "__builtins__", "the secret is")


@pytest.mark.parametrize("payload", ESCAPES)
def test_a_template_can_not_reach_python(tokenizer, tmp_path, payload):
    secret, created = tmp_path / "secret", tmp_path / "created"
    secret.write_text("the secret is 4242")
    payload = payload.replace("SECRET", str(secret)).replace("CREATED", str(created))

    # Without the sandbox it works: else the test would show nothing.
    unsafe = Environment(extensions=[loopcontrols])
    unsafe.globals |= create_environment().globals
    text = unsafe.from_string(payload).render(messages=[USER])
    assert any(leak in text for leak in LEAKS)
    assert created.exists() == (str(created) in payload)
    created.unlink(missing_ok=True)

    try:
        text = tokenizer.apply_chat_template([USER], payload)
    except ValueError as error:
        text = str(error)
        assert text.startswith("the chat template failed")
    else:
        assert not any(leak in text for leak in LEAKS)
    assert "the secret is" not in text
    assert sorted(tmp_path.iterdir()) == [secret]


@pytest.mark.parametrize(
    "payload",
    [
        "{% include 'FILE' %}",
        "{% include 'FILE' ignore missing %}",
        "{% import 'FILE' as file %}{{ file }}",
        "{% from 'FILE' import x %}",
        "{% extends 'FILE' %}",
        "{{ open('FILE').read() }}",
        "{{ __import__('os') }}",
        "{% do messages.append(1) %}",
        "{{ self._environment }}{{ environment.globals }}",
    ],
)
def test_a_template_can_not_read_files_or_import(tokenizer, tmp_path, monkeypatch, payload):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("the secret is 4242{% macro x() %}{% endmacro %}")
    for name in ("secret", str(tmp_path / "secret"), "../../etc/passwd"):
        with pytest.raises(ValueError, match="the chat template failed") as raised:
            tokenizer.apply_chat_template([USER], payload.replace("FILE", name))
        assert "4242" not in str(raised.value)


@pytest.mark.parametrize(
    "expression",
    [
        "messages.append({})",
        "messages.pop()",
        "messages.clear()",
        "messages.insert(0, {})",
        "messages.extend(messages)",
        "messages.reverse()",
        "messages.remove(messages[0])",
        "messages[0].update(content='x')",
        "messages[0].pop('content')",
        "messages[0].popitem()",
        "messages[0].setdefault('x', 1)",
        "messages[0].clear()",
        "messages.__delitem__(0)",
        "messages[0].__setitem__('content', 'x')",
    ],
)
def test_a_template_can_not_change_the_messages(tokenizer, expression):
    victims = turns("a", "b", "c")
    Environment().from_string("{{ " + expression + " }}").render(messages=victims)
    assert victims != turns("a", "b", "c")

    messages = turns("a", "b", "c")
    with pytest.raises(ValueError, match="unsafe"):
        tokenizer.apply_chat_template(messages, "{{ " + expression + " }}")
    assert messages == turns("a", "b", "c")
