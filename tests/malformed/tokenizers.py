"""Tokenizers and chat templates that are wrong, by hand and at random."""

import json

from tests.malformed.datasets import GOOD
from tests.malformed.models import with_file
from tests.malformed.mutations import as_json, changed, damaged
from tests.text.folders import CHATML, byte_fallback_json, byte_level_json, files_of

WHOLE = json.loads(byte_level_json())
SHOW = ("data", "show", "jsonl", "--from", "data.jsonl", "--data-dir", "kept", "--model", "model")
CHAT = (*SHOW, "--chat")


def with_tokenizer(name, content):
    def make(folder):
        with_file(name, content)(folder)
        (folder / "data.jsonl").write_bytes(GOOD)

    return make


def changes(**parts):
    """tokenizer.json with other parts."""
    return as_json(WHOLE | parts)


def model(**parts):
    return changes(model=WHOLE["model"] | parts)


_VOCABULARY = WHOLE["model"]["vocab"]
_SPECIAL = WHOLE["added_tokens"][0]
TOKENIZERS = {
    "no file": None,
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"tokenizer"',
    "not UTF-8": b'{"model": "\xff"}',
    "brackets without end": b"[" * 200_000,
    "mappings without end": b'{"model":' * 100_000,
    "half": byte_level_json().encode()[:3000],
    "an unknown type": b'{"type": "x"}',
    "an alphabet of numbers": b'{"type": "dapo_jax.char", "alphabet": [1]}',
    "an empty alphabet": b'{"type": "dapo_jax.char", "alphabet": ""}',
    "an alphabet with a letter twice": b'{"type": "dapo_jax.char", "alphabet": "aa"}',
    "an alphabet that lacks letters": b'{"type": "dapo_jax.char", "alphabet": "01"}',
    "an alphabet of half a surrogate pair": b'{"type": "dapo_jax.char", "alphabet": "\\ud800"}',
    "an empty model": changes(model={}),
    "an unknown model": model(type="XYZ"),
    "a model without a type": changes(model={k: v for k, v in WHOLE["model"].items() if k != "type"}),
    "no vocabulary": model(vocab={}),
    "a vocabulary of texts": model(vocab={"a": "b"}),
    "a vocabulary of fractions": model(vocab={"a": 1.5}),
    "a negative id": model(vocab={"a": -1}),
    "an id of 2**32": model(vocab={"a": 2**32}),
    "an id of 2**32 - 1": model(vocab=_VOCABULARY | {"a": 2**32 - 1}),
    "an id twice": model(vocab=_VOCABULARY | {"a": 5, "b": 5}),
    "a list as vocabulary": model(vocab=["a"]),
    "merges of what is no token": model(merges=[["zz", "zz"]]),
    "merges of three": model(merges=[["a", "b", "c"]]),
    "merges of numbers": model(merges=[1, 2]),
    "merges of nothing": model(merges=[["", ""]]),
    "merges without a space": model(merges=["ab"]),
    "an unknown token that is not there": model(unk_token="zz"),
    "a dropout over 1": model(dropout=2.0),
    "a dropout below 0": model(dropout=-1.0),
    "every piece dropped": model(dropout=1.0),
    "a Unigram without pieces": changes(model={"type": "Unigram", "vocab": [], "unk_id": 0}),
    "a Unigram with an unknown beyond its pieces": changes(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}),
    "a Unigram of NaN": changes(model={"type": "Unigram", "vocab": [["a", 1e999], ["1", -1e999]], "unk_id": 0}),
    "a WordPiece without an unknown token": changes(model={"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "zz", "continuing_subword_prefix": "##", "max_input_chars_per_word": 1}),
    "a WordLevel without an unknown token": changes(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}),
    "an added token of another id": changes(added_tokens=[_SPECIAL | {"id": 7_000_000}]),
    "an added token without text": changes(added_tokens=[_SPECIAL | {"content": ""}]),
    "an added token that is a number": changes(added_tokens=[3]),
    "an added token of the last id": changes(added_tokens=[*WHOLE["added_tokens"], _SPECIAL | {"id": 2**32 - 1, "content": "x"}]),
    "added tokens in no order": changes(added_tokens=WHOLE["added_tokens"][::-1]),
    "an unknown normalizer": changes(normalizer={"type": "x"}),
    "a normalizer of nonsense": changes(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a normalizer without end": changes(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////////////////////w=="}),
    "a normalizer that empties the text": changes(normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}),
    "a normalizer that repeats": changes(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    "normalizers without end": None,
    "a broken expression": changes(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}),
    "an expression that explodes": changes(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}),
    "an expression that matches nothing": changes(pre_tokenizer={"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False}),
    "an unknown behaviour": changes(pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "X", "invert": False}),
    "a template of what is no token": changes(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}], "pair": [], "special_tokens": {}}),
    "a template without the text": changes(post_processor={"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    "a template of ids beyond": changes(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {"z": {"id": "z", "ids": [4_000_000_000], "tokens": ["z"]}}}),
    "an unknown decoder": changes(decoder={"type": "x"}),
    "a decoder of broken expressions": changes(decoder={"type": "Replace", "pattern": {"Regex": "(["}, "content": ""}),
    "truncation to nothing": changes(truncation={"max_length": 0, "stride": 5, "strategy": "LongestFirst", "direction": "Right"}),
    "padding to all": changes(padding={"strategy": {"Fixed": 2**60}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
    "another version": changes(version="99.0"),
}  # fmt: skip
TOKENIZERS["normalizers without end"] = (
    byte_level_json().replace('"normalizer":null', '"normalizer":' + '{"type":"Sequence","normalizers":[' * 3000 + "]}" * 3000)
).encode()  # fmt: skip

SIDE_FILES = {
    "an end token that is not there": ("tokenizer_config.json", {"eos_token": "zz"}),
    "an end token that is a number": ("tokenizer_config.json", {"eos_token": 3}),
    "an end token of a number inside": ("tokenizer_config.json", {"eos_token": {"content": 3}}),
    "an end token of half a surrogate pair": ("tokenizer_config.json", {"eos_token": "\ud800"}),
    "no end token": ("tokenizer_config.json", {}),
    "a padding token that is not there": ("tokenizer_config.json", {"eos_token": "<|im_end|>", "pad_token": "zz"}),
    "a list": ("tokenizer_config.json", []),
    "nothing": ("tokenizer_config.json", b""),
    "brackets without end": ("tokenizer_config.json", b"[" * 100_000),
    "code of its own": ("tokenizer_config.json", {"eos_token": "<|im_end|>", "auto_map": {"AutoTokenizer": ["evil.py", None]}}),
    "a template that is a number": ("tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": 3}),
    "templates without names": ("tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": [{}, 3]}),
    "end tokens of text": ("generation_config.json", {"eos_token_id": "2"}),
    "end tokens of null": ("generation_config.json", {"eos_token_id": [None]}),
    "a negative end token": ("generation_config.json", {"eos_token_id": -5}),
    "an end token beyond": ("generation_config.json", {"eos_token_id": 2**40}),
    "a padding token beyond": ("generation_config.json", {"pad_token_id": 2**70}),
    "a list as generation_config": ("generation_config.json", [1]),
    "special tokens of lists": ("special_tokens_map.json", {"eos_token": [1], "pad_token": {}}),
    "special tokens that are no JSON": ("special_tokens_map.json", b"\x00"),
}  # fmt: skip

TEMPLATES = {
    "not UTF-8": b"\xff\xfe",
    "nothing": b"",
    "an open block": b"{% for",
    "an open print": b"{{ messages",
    "an unknown tag": b"{% load x %}",
    "an unknown filter": b"{{ messages | shell }}",
    "an unknown name": b"{{ os.system('true') }}",
    "a class": b"{{ ''.__class__ }}",
    "a class by its index": b"{{ ''['__cla' ~ 'ss__'] }}",
    "a class by a filter": b"{{ messages | map(attribute='__class__') | list }}",
    "globals": b"{{ raise_exception.__globals__['os'].system('touch written') }}",
    "globals of a macro": b"{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "globals of self": b"{{ self.__init__.__globals__ }}",
    "a frame": b"{{ (messages | map('upper')).gi_frame }}",
    "the mro": b"{{ ().__class__.__bases__[0].__subclasses__() }}",
    "format": b"{{ '{0.__class__.__mro__}'.format(1) }}",
    "format of a map": b"{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "a format of many letters": b"{{ '%0999999999d' % 1 }}",
    "a format of many letters by a filter": b"{{ '%0999999999d' | format(1) }}",
    "a format of many letters by a method": b"{{ '{:>999999999}'.format(1) }}",
    "an include": b"{% include '/etc/passwd' %}",
    "an import": b"{% import 'x' as y %}",
    "extends": b"{% extends 'x' %}",
    "a loop of 10**12": b"{% for i in range(1000000000000) %}x{% endfor %}",
    "loops in loops": b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops in loops that print": b"{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "a loop over a product": b"{% for i in range(99999) | list * 99999 %}x{% endfor %}",
    "a text of 10**11 letters": b"{{ 'x' * 100000000000 }}",
    "a list of 10**11 entries": b"{{ [0] * 100000000000 }}",
    "a power without end": b"{{ 9 ** 9 ** 9 }}",
    "a power that takes long": b"{{ (9 ** 9999999) }}",
    "a shift without end": b"{% set n = namespace(x=2) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
    "a text that doubles": b"{% set n = namespace(x='xxxxxxxxxx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a list that doubles": b"{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a macro that calls itself": b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": b"{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": b"{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a text to be centred": b"{{ 'x' | center(99999999999) }}",
    "an indent without end": b"{{ 'x\ny' | indent(99999999999) }}",
    "ljust without end": b"{{ 'x'.ljust(99999999999) }}",
    "letters that are replaced": b"{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "letters that are joined": b"{{ ('x' * 99999).join(['y'] * 99999) }}",
    "lorem ipsum": b"{{ lipsum(n=99999999) }}",
    "a cycle": b"{{ cycler.__init__ }}",
    "a batch without end": b"{{ [1] | batch(99999999999, 'x') | list }}",
    "slices without end": b"{{ [1] | slice(99999999999) | list }}",
    "a word wrap": b"{{ ('x ' * 9999) | wordwrap(1) | wordwrap(0) }}",
    "JSON with an indent": b"{{ messages | tojson(indent=99999999999) }}",
    "a date of many letters": b"{{ strftime_now('%999999999d') }}",
    "a date of zero bytes": b"{{ strftime_now('\x00') }}",
    "a date of half a surrogate pair": b"{{ strftime_now('\\ud800') }}",
    "half a surrogate pair": b"{{ '\\ud800' }}",
    "an expression of many brackets": b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}",
    "a list of many brackets": b"{{ " + b"[" * 500 + b"]" * 500 + b" }}",
    "an expression of many signs": b"{{ " + b"-" * 5000 + b"1 }}",
    "an expression of many nots": b"{% if " + b"not " * 5000 + b"1 %}x{% endif %}",
    "an expression of many dots": b"{{ x" + b".x" * 5000 + b" }}",
    "an expression of many sums": b"{{ 1" + b"+1" * 5000 + b" }}",
    "many ifs inside one another": b"{% if 1 %}" * 1000 + b"{% endif %}" * 1000,
    "many loops inside one another": b"{% for i in [1] %}" * 100 + b"{% endfor %}" * 100,
    "a number of many digits": b"{{ " + b"9" * 5000 + b" }}",
    "an assignment to messages": b"{% set messages = 3 %}{{ messages[0].content }}",
    "a change of messages": b"{{ messages.clear() }}",
    "an exception of an object": b"{{ raise_exception(messages) }}",
    "an exception of nothing": b"{{ raise_exception() }}",
    "an exception of many letters": b"{{ raise_exception('x' * 99999) }}",
    "a generation that never ends": b"{% generation %}",
    "debug": b"{% debug %}",
    "white space alone": b"   ",
}  # fmt: skip


def template(source):
    return with_tokenizer("chat_template.jinja", source)


_FRAGMENTS = (
    b"{{", b"}}", b"{%", b"%}", b"{#", b"#}", b"messages", b"message", b".content", b"['role']", b"| tojson", b"| length", b" for ", b" in ", b" if ",
    b" else ", b"endfor", b"endif", b" set x = ", b"namespace(", b")", b"(", b"[0]", b"[::-1]", b"loop.index0", b"range(9)", b"~", b"*", b"**", b"1", b"'x'",
    b"is defined", b"not ", b"raise_exception(", b"strftime_now('%d')", b"-", b"generation", b"macro m()", b"endmacro", b"break", b"continue", b".items()",
    b".format(", b"| map(attribute=", b"\xff", b"\n", b"__class__", b"| list", b"| join", b"| selectattr(", b"self", b"caller()", b"True", b"none", b"//",
)  # fmt: skip


def fuzzed(rng):
    """Makes a folder whose tokenizer or whose template is damaged, and the command for it."""
    kind = rng.integers(4)
    if kind == 0:
        pieces = [_FRAGMENTS[i] for i in rng.integers(len(_FRAGMENTS), size=int(rng.integers(1, 12)))]
        place = int(rng.integers(len(CHATML)))
        whole = CHATML.encode()
        return template(whole[:place] + b" ".join(pieces) + whole[place:]), CHAT
    if kind == 1:
        return template(damaged(CHATML.encode(), rng)), CHAT
    base = (byte_level_json, byte_fallback_json)[rng.integers(2)]()
    if kind == 2:
        described = json.loads(base)
        vocabulary = described["model"]["vocab"]
        shown = {**described, "model": {**described["model"], "vocab": dict(list(vocabulary.items())[-12:])}}
        new = changed(shown, rng)
        if isinstance(new.get("model"), dict) and isinstance(new["model"].get("vocab"), dict):
            new["model"]["vocab"] = {**vocabulary, **new["model"]["vocab"]}
        return with_tokenizer("tokenizer.json", as_json(new)), SHOW
    name = ("tokenizer.json", "tokenizer_config.json")[rng.integers(2)]
    return with_tokenizer(name, damaged(files_of(base)[name], rng)), SHOW
