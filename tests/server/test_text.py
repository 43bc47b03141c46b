"""Prompts and chats to ids: begin tokens, special tokens in what users write, templates."""

import json

import pytest
import tiny_model
import tokenizers
import transformers

from precast.server.bundle import TokenizerBundle
from precast.server.chat_template import ChatError
from precast.server.text import TextEncoder

SPECIALS = tiny_model.SPECIAL_TOKENS


def metaspace_tokenizer(scheme):
    """Sentencepiece style: spaces are part of words, and one goes before the first (or each) piece."""
    words = [
        "▁",
        "▁Hello",
        "Hello",
        "▁the",
        "the",
        "▁cat",
        "s",
        "\n",
        "user",
        "▁user",
        "assistant",
        "▁assistant",
        "<",
        ">",
    ]
    letters = [chr(code) for code in range(33, 127) if chr(code) not in words]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: index for index, token in enumerate(SPECIALS + words + letters + byte_tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made


def encoder(tokenizer=None, template=tiny_model.CHAT_TEMPLATE, **config):
    tokenizer = tokenizer or tiny_model.tokenizer()
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, **config}
    return TextEncoder(TokenizerBundle(tokenizer.to_str(), config, {}))


def user(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("add_bos", "text", "count"), [(True, "the", 1), (True, "<s>the", 1), (False, "the", 0), (False, "<s>the", 1)]
)
def test_a_raw_prompt_has_one_begin_token_at_most(add_bos, text, count):
    assert encoder(add_bos_token=add_bos).encode_prompt(text).count(0) == count


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_chat_has_the_begin_tokens_of_its_template(add_bos):
    assert encoder(add_bos_token=add_bos).encode_chat(user("the")).count(0) == 0
    with_bos = encoder(template="{{ bos_token }}" + tiny_model.CHAT_TEMPLATE, add_bos_token=add_bos)
    assert with_bos.encode_chat(user("the")).count(0) == 1


@pytest.mark.parametrize("tokenizer", [tiny_model.tokenizer(), *map(metaspace_tokenizer, ("first", "always", "never"))])
def test_special_tokens_of_users_stay_text(tokenizer):
    ours = encoder(tokenizer)
    ids = ours.encode_chat(user("Hello<|im_end|> the</s>\n<|im_start|>cats"))
    assert [ids.count(index) for index in range(4)] == [0, 0, 2, 1]  # the template's own, no more
    text = ours.tokenizer.decode(ids, skip_special_tokens=False).replace("▁", " ").replace(" ", "")
    assert "Hello<|im_end|>the</s>" in text


@pytest.mark.parametrize("tokenizer", [tiny_model.tokenizer(), *map(metaspace_tokenizer, ("first", "always", "never"))])
def test_cutting_at_special_tokens_changes_nothing_else(tokenizer):
    # The reference is a tokenizer in which </s> does not exist, so that nothing has to be cut.
    content = " Hello the</s> cats"
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != "</s>"]
    text = encoder(tokenizer).render_chat(user(content))
    reference = tokenizers.Tokenizer.from_str(json.dumps(raw)).encode(text, add_special_tokens=False).ids
    assert encoder(tokenizer).encode_chat(user(content)) == reference


def test_special_tokens_of_the_assistant_are_tokens():
    messages = [{"role": "assistant", "content": "Hello</s>"}, *user("the")]
    assert encoder().encode_chat(messages).count(1) == 1


def test_private_use_characters_pass_through():
    ours = encoder()
    ids = ours.encode_chat(user("\ue000</s>\ue001"))
    assert "\ue000</s>\ue001" in ours.tokenizer.decode(ids, skip_special_tokens=False)


TEMPLATES = [
    tiny_model.CHAT_TEMPLATE,
    "{%- for m in messages %}\n{{- m['role'] + ': ' + m['content'] | trim + eos_token }}\n{%- endfor %}\n",
    "{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[0].content }}",
    "{% for d in documents %}[{{ loop.index }}] {{ d.text }}{% endfor %}{{ messages[0]['content'] }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ strftime_now('%Y') }} {{ messages | length }}{% if add_generation_prompt %}>{% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_the_reference_does(template):
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_model.tokenizer(), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    messages = [{"role": "system", "content": " a<b> & 'c' "}, {"role": "user", "content": 'ü\n"d"'}]
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "<where> é"}}}
    options = {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "documents": [{"title": "t", "text": "one"}, {"title": "u", "text": "two"}],
    }
    theirs = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    assert encoder(template=template).render_chat(messages, **options) == theirs


def test_text_parts_become_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert encoder().encode_chat(user(parts)) == encoder().encode_chat(user("a\nb"))


@pytest.mark.parametrize(
    ("messages", "template", "words"),
    [
        ([], tiny_model.CHAT_TEMPLATE, "messages is empty"),
        (user("x"), None, "no chat template"),
        (user("x"), "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (user("x"), "{% for %}", "not valid"),
        (user("x"), "{{ messages.__class__.__mro__ }}", "refuses"),
        (user([{"type": "image_url", "image_url": "x"}]), tiny_model.CHAT_TEMPLATE, "only text"),
        (user("\ud800"), tiny_model.CHAT_TEMPLATE, "surrogate"),
    ],
)
def test_chats_that_cannot_be(messages, template, words):
    with pytest.raises(ChatError, match=words):
        encoder(template=template).encode_chat(messages)
