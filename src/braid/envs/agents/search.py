"""The search tool: documents of a JSON lines file, ranked by BM25."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from braid.errors import DataError
from braid.json_text import parse_json

MAX_RESULTS = 10


class Document(NamedTuple):
    """A document. Queries are matched with title and text."""

    id: str
    title: str
    text: str


class SearchIndex:
    """An index in memory. `search` is the tool; it may run in several threads at a time."""

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s

        self._documents, self._tokenize = documents, bm25s.tokenize
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(self._words([f"{d.title} {d.text}" for d in documents]), show_progress=False)

    @classmethod
    def read(cls, path: Path) -> SearchIndex:
        """Read a file with an object {id, title, text} per line; only `text` is required. Raises
        DataError."""
        documents = list(_read(path))
        if not documents:
            raise DataError(f"{path}: has no documents")
        return cls(documents)

    def search(self, query: str, num_results: int = 3) -> str:
        """Search the documents for words.

        Args:
            query: The words to search for.
            num_results: The number of documents to return, at most 10.
        """
        (words,) = self._words([query])
        if not words:
            return "no results"
        scores = self._index.get_scores(words)
        best = (-scores).argsort(kind="stable")[: max(1, min(num_results, MAX_RESULTS))]
        documents = [self._documents[i] for i in best if scores[i] > 0]
        entries = (
            f"[{n}] {document.title or document.id}\n{document.text}"
            for n, document in enumerate(documents, 1)
        )
        return "\n\n".join(entries) or "no results"

    def _words(self, texts: list[str]) -> Any:
        return self._tokenize(
            texts, token_pattern=r"(?u)\b\w+\b", stopwords="en", return_ids=False, show_progress=False
        )


def _read(path: Path) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _document(line, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error


def _document(line: str, where: str) -> Document:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise DataError(f"{where}: not an object with a string `text`, as in {{id, title, text}}")
    return Document(str(row.get("id", "")), str(row.get("title", "")), row["text"])
