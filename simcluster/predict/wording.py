"""What a prompt's wording and looks say about the answer: limits of length, kind of task, notation."""

import re
import string

__all__ = ["WORDING_FEATURES", "wording"]

_EDGE = 600  # characters: instructions stand at a prompt's start or end, what lies between is material

_LETTERS = frozenset(string.ascii_lowercase.encode())
_WORDS_ALONE = bytes(byte if byte in _LETTERS else ord(" ") for byte in range(256))
_NUMBERS = {
    word: number
    for number, word in enumerate(
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
        start=1,
    )
} | {"single": 1, "couple": 2, "few": 3, "twenty": 20, "fifty": 50, "hundred": 100, "thousand": 1000}
_UNITS = {  # roughly how many words it has
    "word": 1,
    "sentence": 20,
    "line": 10,
    "item": 15,
    "point": 20,
    "bullet": 20,
    "step": 20,
    "reason": 25,
    "example": 20,
    "paragraph": 100,
    "page": 400,
}
_UNITS |= {f"{unit}s": words for unit, words in _UNITS.items()}


def _words(*words: str) -> frozenset[bytes]:
    return frozenset(word.encode() for word in words)


_UNIT_WORDS = _words(*_UNITS)
_STATED = re.compile(
    rf"\b(\d{{1,5}}|{'|'.join(_NUMBERS)})[ -](?:[a-z]+[ -])?({'|'.join(sorted(_UNITS, key=len, reverse=True))})\b"
)
_AT_MOST = (
    "at most",
    "no more than",
    "not more than",
    "less than",
    "fewer than",
    "under",
    "up to",
    "within",
    "maximum",
    "max",
    "limit",
)
_AT_LEAST = ("at least", "no less than", "more than", "minimum", "or more")


def _pattern(phrases: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(phrases)})\b")


_PATTERNS: dict[tuple[str, ...], re.Pattern[str]] = {phrases: _pattern(phrases) for phrases in (_AT_MOST, _AT_LEAST)}

_SETS: dict[str, frozenset[bytes]] = {
    name: _words(*words.split())
    for name, words in {
        "wants_brief": "brief briefly short shortly concise concisely succinct succinctly quick quickly only single",
        "wants_detail": "detail details detailed long thorough thoroughly comprehensive elaborate essay article report",
        "task_list": "list lists enumerate bullet bullets names name items ideas suggest suggestions brainstorm",
        "task_summarise": "summarize summarise summary summarizing summarising tldr condense abstract gist overview",
        "task_explain": "explain explains why describe description how reason reasons discuss meaning means",
        "task_write": "write story poem compose essay letter email song tale novel haiku lyrics script blog speech",
        "task_edit": "rewrite rephrase paraphrase edit correct improve proofread shorten grammar convert replace",
        "task_translate": "translate translation translated",
        "task_classify": "classify categorize categorise label sentiment category true false yes no determine identify",
        "task_code": "code function python java javascript sql program html class script def algorithm regex api",
        "task_compute": "calculate compute solve sum total many much equation probability percent average cost left",
        "task_compare": "compare contrast difference differences versus vs better between similarities",
        "task_question": "what who whom whose when where which",
        "task_choice": "choice choices option options choose select following",
    }.items()
}
WORDING_FEATURES = (
    "stated_words",
    "has_stated_length",
    "has_at_most",
    "has_at_least",
    "has_choices",
    "ends_with_colon",
    "ends_with_question",
    "starts_in_lower_case",
    "starts_with_question_word",
    "has_mathematics",
    "has_blank",
    "has_brackets",
    "capital_share",
    "digit_share",
    "comma_share",
    "quote_share",
    "line_breaks",
    *_SETS,
)
_LOOKED_FOR = frozenset().union(*_SETS.values(), _UNIT_WORDS)
_ASKS = ("what", "who", "when", "where", "which", "how", "why")
_CAPITALS, _DIGITS = (letters.encode() for letters in (string.ascii_uppercase, string.digits))
# `(?:^|\s)\(?[a-d1-4][).:]\s`, with what stands before looked at last: a search skips to the signs after a letter.
_CHOICES = re.compile(r"[).:]\s(?<=[a-d1-4]..)(?:(?<!\S...)|(?<=\(...)(?<!\S\(...))", re.DOTALL)


def wording(text: str) -> list[float]:
    """Return the values named by WORDING_FEATURES.

    `has_`, `wants_`, `task_`, `starts_` and `ends_` are 1 or 0, shares are of the bytes, `stated_words` is a number of
    words or 0. Words are looked for in the first and the last 600 characters alone.

    Args:
        text: the prompt.
    """
    edges = text if len(text) <= 2 * _EDGE else f"{text[:_EDGE]}\n{text[-_EDGE:]}"
    shares = _shares(text)
    start, end = text[:_EDGE].lstrip(), text[-_EDGE:].rstrip()
    edges = edges.lower()
    # Words are runs of a to z: bytes are cut faster than text is searched.
    words = _LOOKED_FOR.intersection(edges.encode("utf-8", "replace").translate(_WORDS_ALONE).split())
    stated = 0.0
    if not words.isdisjoint(_UNIT_WORDS):
        found = _STATED.search(edges)
        if found is not None:
            number, unit = found.groups()
            stated = float((_NUMBERS.get(number) or int(number)) * _UNITS[unit])
    return [
        stated,
        float(stated > 0),
        float(_has(_AT_MOST, edges)),
        float(_has(_AT_LEAST, edges)),
        float(_CHOICES.search(edges) is not None),
        float(end.endswith(":")),
        float(end.endswith("?")),
        float(start[:1].islower()),
        float(start[:5].lower().startswith(_ASKS)),
        float("$" in text or "\\" in text),
        float("_" in text),
        float("(" in text),
        *shares,
        *[0.0 if words.isdisjoint(wanted) else 1.0 for wanted in _SETS.values()],
    ]


def _has(phrases: tuple[str, ...], text: str) -> bool:
    """Tell whether one of the phrases stands in a text, not inside of words."""
    for phrase in phrases:  # most texts have none, and to see that costs less than to search for a pattern
        if phrase in text:
            return _PATTERNS[phrases].search(text) is not None
    return False


def _shares(text: str) -> list[float]:
    """Return the shares of capitals, digits, commas and quotation marks, and the number of line breaks."""
    content = text.encode("utf-8", "replace")
    n = len(content)
    counts = (
        n - len(content.translate(None, _CAPITALS)),
        n - len(content.translate(None, _DIGITS)),
        content.count(b","),
        content.count(b'"'),
    )
    return [count / max(n, 1) for count in counts] + [float(content.count(b"\n"))]
