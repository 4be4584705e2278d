"""Synthetic prompt texts: invented words that carry a request's task and length, and sometimes the answer's length.

Nobody wrote these prompts and no model answered them. They exist so that what needs a text, a predictor above all, can
be run on the synthetic mix.
"""

from dataclasses import dataclass

import numpy as np

from simcluster.predict.tokens import EstimatedTokens
from simcluster.workload.recipe import Mix
from simcluster.workload.tasks import TaskMix
from simcluster.workload.trace_columns import StrArray

__all__ = ["draw_prompts"]

_STATED_SHARE = 0.5  # of the prompts say how long the answer should be
_WORDS_PER_TOKEN = 0.75
_SENTENCE = 12  # words


@dataclass(frozen=True, slots=True)
class _Style:
    """How the prompts of a task are worded: an instruction, then words of the topic, of nine letters at most."""

    instructions: tuple[str, ...]
    topic: str


_COMMON = "the of and a to in is was for that with as on by at from it an are were be this had not which or but has"
_STYLES = {
    "alpaca": _Style(
        (
            "List three ideas for this:",
            "Explain this in simple terms:",
            "Rewrite this more clearly:",
            "Describe how this works:",
            "Give advice about this:",
        ),
        "garden meal budget email team phone travel health sleep music app water plan work home skill "
        "book city exercise recipe friend school market paper color habit tool family event office "
        "website",
    ),
    "hotpotqa": _Style(
        (
            "Which of the two was born first? Answer from the text below.",
            "Who led the group named in both texts? Answer from them.",
            "What city is the place below in? Answer from the text.",
            "When did the film named below come out? Use the text.",
        ),
        "born film album band actor river county player season award king singer series club town novel "
        "party museum station director league island railway church battle record village team member "
        "title",
    ),
    "govreport": _Style(
        (
            "Summarize the report below.",
            "Write a summary of this report.",
            "Give an overview of the findings of the report below.",
        ),
        "agency program federal funds report office policy data review budget act state fiscal costs "
        "congress oversight health defense contract audit service plan risk staff system security "
        "estimate grant guidance officials years billion percent",
    ),
    "writingprompts": _Style(
        (
            "Write a story about this:",
            "Tell a tale that begins like this:",
            "Write a scene for a novel:",
            "Compose a story from this idea:",
        ),
        "dragon moon ghost king door night ship dream war magic silence stranger forest robot mirror "
        "planet memory wolf storm child death castle star secret letter voice blood time witch hero",
    ),
}
_OTHER = _Style(("Do this:",), "alpha beta gamma delta omega sigma")


def draw_prompts(mix: Mix, drawn: TaskMix, rng: np.random.Generator) -> StrArray:
    """Return a text for each request, Python strings, (n,).

    A text has as many tokens, by the estimate of `EstimatedTokens`, as the request's prompt, unless its instruction
    alone has more. Half of them state a length: three words for four tokens of the answer, averaged over the models.

    Args:
        mix: the kinds of requests; four tasks have words of their own.
        drawn: the requests.
        rng: draws the words.
    """
    answers = np.exp(np.mean([np.log(drawn.output_tokens[model]) for model in mix.length_factor], axis=0))
    tokens = EstimatedTokens()
    texts = np.empty(len(drawn.task), dtype=object)
    for row, (code, target) in enumerate(zip(drawn.task.tolist(), drawn.prompt_tokens.tolist(), strict=True)):
        style = _STYLES.get(drawn.task_names[code], _OTHER)
        words = _stated_words(float(answers[row]))
        texts[row] = _text(style, target, words if rng.random() < _STATED_SHARE else None, tokens, rng)
    return texts


def _stated_words(answer_tokens: float) -> int:
    """Return how many words a person would ask for: tens, or fifties above 200."""
    words = _WORDS_PER_TOKEN * answer_tokens
    step = 10 if words < 200 else 50
    return max(step, round(words / step) * step)


def _text(style: _Style, target: int, words: int | None, tokens: EstimatedTokens, rng: np.random.Generator) -> str:
    start = style.instructions[int(rng.integers(len(style.instructions)))]
    end = "" if words is None else f" Use about {words} words."
    if len(tokens.ids(start + end)) > target:
        end = ""
    left = max(target - len(tokens.ids(start + end)), 0)
    return start + _filler(style, left, rng) + end


def _filler(style: _Style, size: int, rng: np.random.Generator) -> str:
    """Return sentences of so many tokens, each word or sign one."""
    vocabulary = f"{_COMMON} {style.topic}".split()
    drawn = rng.integers(len(vocabulary), size=size).tolist()
    ends = [number % (_SENTENCE + 1) == _SENTENCE or number == size - 1 for number in range(size)]
    return "".join("." if end else f" {vocabulary[k]}" for k, end in zip(drawn, ends, strict=True))
