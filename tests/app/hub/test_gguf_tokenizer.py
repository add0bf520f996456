from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from chatkv.app.errors import UserError
from chatkv.app.hub.gguf_metadata import read_metadata
from chatkv.app.hub.gguf_tokenizer import GgufTokenizer, convert_tokenizer
from chatkv.app.hub.pre_tokenizers import PRE_TOKENIZERS
from tests.app.hub.makers import TINY_TOKENS, TINY_TYPES, write_gguf

CORPUS = [
    "",
    " ",
    "   leading and trailing   ",
    "Hello, world! It's 9 o'clock; we'll've gone.",
    "tabs\tand\nnewlines\r\n\n\n  indented\n\tcode",
    "def f(x: int) -> int:\n    return x ** 2  # 10%\n\n\nclass A:\n    pass\n",
    '{"key": [1, 2.50, -3e10], "nested": {"a": null}}',
    "SELECT * FROM t WHERE a<>'b' AND c>=10;",
    "中文測試：今天天氣很好，我們去公園吧。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "emoji 😀👍🏽👨‍👩‍👧‍👦🇪🇺 and ☃️ symbols ∑∫√≠ ½ ① Ⅷ",
    "é vs e\u0301, ﬁ ligature, ​zero width, \u00a0nbsp, \u3000ideographic",
    "العربية עברית हिन्दी ไทย ქართული Ελληνικά русский",
    "x1y22z333 4444 55,555.55 6 ٣٤٥ ４５６",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
    "<|im_start |> < |im_end|> im_start|>",
    "https://example.org/a_b-c?d=e&f=%20#g  user@example.org",
    "\x00\x01\x7f control \ufeff bom \uffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    "\U0001f9ff\U0010fffd astral",
]
DIGITS_AFTER_BLANKS = ["a  1", "x =   12", "a\n 12", "\t\t3", "1\n\n2", "  ½"]


def random_texts(count: int) -> list[str]:
    """Seeded mixtures of scripts, blanks, digits and punctuation."""
    rng = random.Random(7)
    pools = ["abcXYZ'", "0123456789½４", "  \t\n\r", ".,;:!?-_/(){}<|>", "中日本語한", "😀👍\u200d\u0301", "éßñøаяΩ"]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 60))) for _ in range(count)]


def load(converted: GgufTokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(converted.tokenizer_json))


@pytest.fixture(scope="module")
def default_converted(default_gguf: Path) -> GgufTokenizer:
    return convert_tokenizer(read_metadata(default_gguf), default_gguf)


@pytest.fixture(scope="module")
def transformers_conversion(default_gguf: Path) -> Tokenizer:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, described, _ = get_gguf_tokenizer(str(default_gguf))
    return convert_gguf_tokenizer(architecture, described)[0]


def is_cut_otherwise_by_transformers(text: str) -> bool:
    """That conversion leaves out the first cut of `smollm`, digits alone. It shows where blanks come before a digit,
    and for digits that are not ASCII (their bytes have merges)."""
    is_digit = [unicodedata.category(letter)[0] == "N" for letter in text]
    return any(digit and not letter.isascii() for letter, digit in zip(text, is_digit, strict=True)) or any(
        text[i].isspace() and text[i + 1].isspace() and is_digit[i + 2] for i in range(len(text) - 2)
    )


def test_the_default_tokenizer_equals_that_of_transformers(
    default_converted: GgufTokenizer, transformers_conversion: Tokenizer
) -> None:
    ours = load(default_converted)
    texts = [text for text in CORPUS + random_texts(4000) if not is_cut_otherwise_by_transformers(text)]
    assert len(texts) > 1000
    for text in texts:
        assert ours.encode(text).ids == transformers_conversion.encode(text).ids, repr(text)


def test_with_the_cut_of_its_own_tokenizer_json_every_text_is_equal(
    default_converted: GgufTokenizer, transformers_conversion: Tokenizer
) -> None:
    """SmolLM2's tokenizer.json says Digits(individual), then ByteLevel."""
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    original = Tokenizer.from_str(transformers_conversion.to_str())
    original.pre_tokenizer = pre_tokenizers.Sequence(cut)  # type: ignore[assignment]
    ours = load(default_converted)
    for text in CORPUS + DIGITS_AFTER_BLANKS + random_texts(2000):
        ids = ours.encode(text).ids
        assert ids == original.encode(text).ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_the_default_tokenizer_gives_ids_that_other_programs_published(default_converted: GgufTokenizer) -> None:
    ours = load(default_converted)
    assert ours.encode("Hello world! 123").ids == [19556, 905, 17, 216, 33, 34, 35]
    assert ours.encode("  multiple   spaces").ids == [216, 2701, 256, 5600]
    assert ours.encode("Café déjà vu.").ids == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]


def test_the_default_model_ends_at_its_end_tokens_and_has_no_bos_of_its_own(default_converted: GgufTokenizer) -> None:
    assert default_converted.eos_token_ids == (2, 0)
    assert default_converted.bos_token_id == 1
    assert not default_converted.adds_bos
    assert default_converted.tokenizer_json["post_processor"] is None
    assert default_converted.special_tokens["eos_token"] == "<|im_end|>"
    assert default_converted.chat_template is not None


def tiny(tmp_path: Path, **keys: Any) -> GgufTokenizer:
    names = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    file = write_gguf(tmp_path / "t.gguf", keys=names)
    return convert_tokenizer(read_metadata(file), file)


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    converted = tiny(tmp_path)
    flags = {token["content"]: token["special"] for token in converted.tokenizer_json["added_tokens"]}
    assert flags == {"<|im_start|>": True, "<|im_end|>": True, "<think>": False}
    tokenizer = load(converted)
    ids = tokenizer.encode("<think> the<|im_end|>").ids
    assert [TINY_TOKENS[i] for i in ids] == ["<think>", "Ġthe", "<|im_end|>"]
    assert tokenizer.decode(ids) == "<think> the"


def test_end_tokens_come_from_the_file_and_from_known_names(tmp_path: Path) -> None:
    tokens = [*TINY_TOKENS, "<|eot_id|>", "<|endoftext|>", "<EOT>"]
    types = [*TINY_TYPES, 3, 3, 1]
    first = len(TINY_TOKENS)
    converted = tiny(tmp_path, tokens=tokens, token_type=types, eos_token_id=first + 1, eot_token_id=first)
    assert converted.eos_token_ids == (first + 1, first, TINY_TOKENS.index("<|im_end|>"))
    assert "<EOT>" in tokens, "a normal token of that name ends nothing"


def test_an_id_outside_the_vocabulary_counts_as_none(tmp_path: Path) -> None:
    converted = tiny(tmp_path, bos_token_id=2**32 - 1)
    assert converted.bos_token_id is None


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_begin_token_is_added_when_the_file_or_its_kind_says_so(
    tmp_path: Path, pre: str, flag: bool | None, adds: bool
) -> None:
    keys: dict[str, Any] = {"pre": pre} if flag is None else {"pre": pre, "add_bos_token": flag}
    converted = tiny(tmp_path, **keys)
    assert converted.adds_bos is adds
    assert load(converted).encode("the").tokens[: int(adds)] == ["<|im_start|>"][: int(adds)]


def test_an_unknown_cut_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a way called 'klingon'"):
        tiny(tmp_path, pre="klingon")


def test_a_file_that_does_not_name_its_cut_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "old.gguf", without=("tokenizer.ggml.pre",))
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.pre"):
        convert_tokenizer(read_metadata(file), file)


@pytest.mark.parametrize("missing", ["tokens", "merges"])
def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path, missing: str) -> None:
    file = write_gguf(tmp_path / "none.gguf", without=(f"tokenizer.ggml.{missing}",))
    with pytest.raises(UserError, match=f"no tokenizer.ggml.{missing}"):
        convert_tokenizer(read_metadata(file), file)


def test_an_unknown_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="of the kind 'bert'"):
        tiny(tmp_path, model="bert")


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_cut_loads_and_loses_no_text(tmp_path: Path, pre: str) -> None:
    tokenizer = load(tiny(tmp_path, pre=pre))
    for text in CORPUS + random_texts(200):
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ12"]),
        ("qwen2", "DON'T 123", ["DON", "'T", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "x 12345", ["x", "Ġ", "123", "45"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("gpt-4o", "it's 1234", ["it's", "Ġ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", "Ġ", "123", "4"]),
    ],
)
def test_texts_are_cut_as_each_kind_demands(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    cut = load(tiny(tmp_path, pre=pre)).pre_tokenizer
    assert cut is not None
    assert [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Trained on the corpus, in SentencePiece's form: <unk>, <s>, </s>, 256 bytes, then pieces, best score first."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)  # type: ignore[assignment]
    trained.train_from_iterator(CORPUS[:12] * 3, trainers.BpeTrainer(vocab_size=700, show_progress=False))
    vocab = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    letters = [piece for piece, _ in vocab if len(piece) == 1]
    merged = [piece for piece, _ in vocab if len(piece) > 1]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *merged, *letters]
    scores = [0.0] * 259 + [-float(n) for n in range(len(merged) + len(letters))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters))


def llama_cpp_ids(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """llama.cpp's algorithm in its plainest form: join the neighbours with the best score, the leftmost first."""
    token_to_id = {token: index for index, token in enumerate(tokens)}
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        best = max(
            (
                (scores[token_to_id[joined]], -index)
                for index in range(len(symbols) - 1)
                if (joined := symbols[index] + symbols[index + 1]) in token_to_id
            ),
            default=None,
        )
        if best is None:
            break
        symbols[-best[1] : -best[1] + 2] = ["".join(symbols[-best[1] : -best[1] + 2])]
    ids: list[int] = []
    for symbol in symbols:
        whole = token_to_id.get(symbol)
        ids += [whole] if whole is not None else [token_to_id[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufTokenizer, list[str], list[float]]:
    tokens, scores, types = sentencepiece_vocabulary()
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    file = write_gguf(tmp_path_factory.mktemp("spm") / "spm.gguf", keys=keys, without=("tokenizer.ggml.merges",))
    return convert_tokenizer(read_metadata(file), file), tokens, scores


def test_a_sentencepiece_vocabulary_encodes_as_llama_cpp_does(
    sentencepiece: tuple[GgufTokenizer, list[str], list[float]],
) -> None:
    converted, tokens, scores = sentencepiece
    tokenizer = load(converted)
    plain = [text for text in CORPUS + random_texts(300) if "<" not in text]
    assert len(plain) > 150
    for text in plain:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == llama_cpp_ids(text, tokens, scores), repr(text)
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_a_sentencepiece_vocabulary_begins_with_bos_once_and_keeps_control_tokens_whole(
    sentencepiece: tuple[GgufTokenizer, list[str], list[float]],
) -> None:
    converted, *_ = sentencepiece
    tokenizer = load(converted)
    assert tokenizer.encode("a").ids[0] == 1
    assert tokenizer.encode("a").ids.count(1) == 1
    assert tokenizer.encode("a</s>").ids[-1] == 2
    assert converted.eos_token_ids == (2,)


def test_no_merge_makes_a_control_token(sentencepiece: tuple[GgufTokenizer, list[str], list[float]]) -> None:
    converted, *_ = sentencepiece
    made = {left + right for left, right in converted.tokenizer_json["model"]["merges"]}
    assert made
    assert made.isdisjoint({"<unk>", "<s>", "</s>"})


def test_a_byte_level_tokenizer_survives_the_way_through_a_gguf(tmp_path: Path) -> None:
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    original.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    original.train_from_iterator(CORPUS * 3, trainer)
    spec = json.loads(original.to_str())["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].get)
    merges = [" ".join(merge) for merge in spec["merges"]]
    types = [3 if token == "<|endoftext|>" else 1 for token in tokens]
    converted = tiny(
        tmp_path, pre="gpt-2", tokens=tokens, merges=merges, token_type=types, bos_token_id=0, eos_token_id=0
    )
    back = load(converted)
    for text in CORPUS + random_texts(300):
        assert back.encode(text).ids == original.encode(text).ids, repr(text)
