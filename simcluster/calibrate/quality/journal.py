"""What has been answered and scored so far, on disk: a run that was stopped goes on where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from simcluster.errors import CalibrationError
from simcluster.validation import shown

__all__ = ["Journal"]

Row = dict[str, Any]


class Journal:
    """A folder with `settings.json` and two files of JSON lines that only grow.

    Attributes:
        answers: {(prompt id, model): {"text", "output_tokens", "prompt_tokens", "finish_reason"}}.
        scores: {prompt id: {model: score 0 to 10}}.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open or begin a journal.

        Args:
            folder: is made if it does not exist.
            settings: everything that an answer or a score depends on.

        Raises:
            CalibrationError: the folder belongs to other settings, is damaged or cannot be written.
        """
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._settle(dict(settings))
            self.answers: dict[tuple[str, str], Row] = {
                (row["prompt_id"], row["model"]): row for row in self._rows("answers.jsonl", ("prompt_id", "model"))
            }
            self.scores: dict[str, dict[str, float]] = {
                row["prompt_id"]: row["scores"] for row in self._rows("scores.jsonl", ("prompt_id", "scores"))
            }
            self._files: dict[str, IO[str]] = {
                name: (folder / name).open("a", encoding="utf-8") for name in ("answers.jsonl", "scores.jsonl")
            }
        except OSError as error:
            raise CalibrationError(f"{folder}: {error.strerror}; give another folder with --work") from None

    def __enter__(self) -> Self:
        """Use it in a `with` statement, which closes the files."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def add_answer(self, prompt_id: str, model: str, answer: Row) -> None:
        """Keep one answer."""
        row = {"prompt_id": prompt_id, "model": model, **answer}
        self._append("answers.jsonl", row)
        self.answers[prompt_id, model] = row

    def add_scores(self, prompt_id: str, scores: dict[str, float]) -> None:
        """Keep the scores of all answers to one prompt."""
        self._append("scores.jsonl", {"prompt_id": prompt_id, "scores": scores})
        self.scores[prompt_id] = scores

    def _append(self, name: str, row: Row) -> None:
        file = self._files[name]
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()  # a killed run loses at most the line that it is writing

    def _settle(self, settings: Row) -> None:
        path = self._folder / "settings.json"
        if not path.exists():
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
            temporary.replace(path)
            return
        try:
            before = json.loads(path.read_text("utf-8"))
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise CalibrationError(f"{path}: is damaged; give another folder with --work, or delete this one")
        for name in sorted({*before, *settings}):
            if before.get(name) != settings.get(name):
                raise CalibrationError(
                    f"{self._folder}: was begun with {name} = {shown(before.get(name))}, now it is "
                    f"{shown(settings.get(name))}; go on with the same, or give another folder with --work"
                )

    def _rows(self, name: str, keys: tuple[str, ...]) -> list[Row]:
        path = self._folder / name
        if not path.exists():
            return []
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # the run was killed while it wrote this line
            os.truncate(path, whole)
        rows = []
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or any(key not in row for key in keys):
                raise CalibrationError(f"{path}: line {number} is damaged; delete the line to have it done again")
            rows.append(row)
        return rows
