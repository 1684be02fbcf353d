"""Chat templates: a conversation's text is what transformers makes of it."""

import pytest

from tests.common import peer, rewrite
from tools import chat
from zigzag.core.errors import ConfigError

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'exact'."}, {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    [{{ m.role }}] {% generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}
{{ messages | tojson }} {{ tools is none }}
{% if add_generation_prompt %}[assistant]{% endif %}
"""


def set_template(folder, template):
    rewrite(folder / "tokenizer_config.json", chat_template=template)


@pytest.mark.slow
def test_a_chat_is_what_transformers_makes_of_it(folder):
    """A prompt in another form than in fine-tuning: blanks, escapes, special tokens."""
    transformers = peer("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>",
        chat_template=TEMPLATE)
    set_template(folder, TEMPLATE)
    for begins_answer in (True, False):
        assert chat.chat_prompt(folder, MESSAGES, add_generation_prompt=begins_answer) == (
            theirs.apply_chat_template(MESSAGES, tokenize=False,
                                       add_generation_prompt=begins_answer))


def test_where_a_template_is_found(folder):
    """The wrong one of several templates, or one that chat_template.jinja replaces."""
    peer("jinja2")

    def prompt(**more):
        return chat.chat_prompt(folder, MESSAGES, **more)

    with pytest.raises(ConfigError, match="no chat template 'default'"):
        prompt()
    set_template(folder, [{"name": "default", "template": "one"},
                          {"name": "tool_use", "template": "two {{ tools }}"}])
    assert prompt() == "one" and prompt(template="tool_use", tools=["t"]) == "two ['t']"
    with pytest.raises(ConfigError, match="did you mean 'tool_use'"):
        prompt(template="tool_us")
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ strftime_now('%Y') | length }}")
    assert prompt() == "</s>4" and prompt(template="tool_use") == "two None"


@pytest.mark.parametrize("template", [
    "{{ raise_exception('roles must alternate') }}", "{% if %}", "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 1 / 0 }}", "{{ messages[9].content }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ messages + 1 }}"])
def test_a_template_can_do_nothing_but_write(folder, template):
    """A template, a program from the folder, that changes its arguments or leaves the sandbox; a
    refusal of a template that is a traceback."""
    peer("jinja2")
    set_template(folder, template)
    with pytest.raises(ConfigError, match="its chat template refuses these messages"):
        chat.chat_prompt(folder, MESSAGES)
    assert len(MESSAGES) == 4
