"""Owns the token arrays and the order in which training sees them; every batch follows from the seed and two cursors.

Example:
    data = TrainingData.build(corpus, work, n_documents=100_000, seed=1)
    sampler = Sampler(data, seed=1)
    tokens, targets = sampler.batch(rows=16, row_tokens=512, book_fraction=0.5)   # [16,512] i64 each
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.books import DOCUMENT_SEPARATOR, load_books
from training.chat_format import Parts
from training.model import IGNORED
from training.synthetic import make_documents
from training.tokenizer import train_tokenizer

TokenIds = NDArray[np.uint16]
N_TOKENIZER_DOCUMENTS = 20_000
END_OF_TEXT = "<|endoftext|>"


def encode_documents(
    tokenizer: Tokenizer, documents: list[Parts]
) -> tuple[TokenIds, NDArray[np.bool_], NDArray[np.int64]]:
    """Concatenate documents, each closed by <|endoftext|>: token ids, loss mask, and where each document starts."""
    end_id = tokenizer.encode(END_OF_TEXT).ids[0]
    flat = [text for parts in documents for text, _ in parts]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(flat, add_special_tokens=False)]
    ids: list[int] = []
    mask: list[bool] = []
    starts: list[int] = []
    cursor = 0
    for parts in documents:
        starts.append(len(ids))
        for _, is_target in parts:
            ids.extend(encoded[cursor])
            mask.extend([is_target] * len(encoded[cursor]))
            cursor += 1
        ids.append(end_id)
        mask.append(parts[-1][1])  # after a chat's end mark nothing is predicted
    return np.array(ids, np.uint16), np.array(mask, np.bool_), np.array(starts, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """book_ids [n]; synthetic_ids [m], synthetic_mask [m], synthetic_starts [documents]."""

    book_ids: TokenIds
    synthetic_ids: TokenIds
    synthetic_mask: NDArray[np.bool_]
    synthetic_starts: NDArray[np.int64]

    @staticmethod
    def build(corpus: Path, work: Path, *, n_documents: int, seed: int) -> "TrainingData":
        """Clean, generate, train the tokenizer (kept in work/tokenizer.json) and encode; heldout.txt goes to `work`."""
        work.mkdir(parents=True, exist_ok=True)
        train_books, held_out = load_books(corpus)
        (work / "heldout.txt").write_text(DOCUMENT_SEPARATOR.join(held_out.values()) + "\n", encoding="utf-8")
        documents = make_documents(n_documents, seed=seed)
        path = work / "tokenizer.json"
        if not path.exists():
            sample = ["".join(text for text, _ in parts) for parts in documents[:N_TOKENIZER_DOCUMENTS]]
            train_tokenizer([*train_books.values(), *sample]).save(str(path))
        tokenizer = Tokenizer.from_file(str(path))
        books = [[(text, True)] for text in train_books.values()]
        book_ids, _, _ = encode_documents(tokenizer, books)
        ids, mask, starts = encode_documents(tokenizer, documents)
        return TrainingData(book_ids=book_ids, synthetic_ids=ids, synthetic_mask=mask, synthetic_starts=starts)


class Sampler:
    """Walks books in shuffled windows and synthetic documents in order; owns the two cursors of a checkpoint."""

    def __init__(self, data: TrainingData, *, seed: int) -> None:
        self.data = data
        self.seed = seed
        self.book_tokens_seen = 0
        self.next_document = 0

    def book_row(self, row_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next window of the current shuffle: tokens and targets, [row_tokens] each."""
        book_ids = self.data.book_ids
        n_windows = (len(book_ids) - row_tokens - 1) // row_tokens
        epoch, index = divmod(self.book_tokens_seen // row_tokens, n_windows)
        rng = np.random.default_rng([self.seed, epoch, row_tokens])
        offset = int(rng.integers(0, row_tokens))
        start = min(offset + int(rng.permutation(n_windows)[index]) * row_tokens, len(book_ids) - row_tokens - 1)
        self.book_tokens_seen += row_tokens
        window = book_ids[start : start + row_tokens + 1].astype(np.int64)
        return window[:-1], window[1:]

    def synthetic_row(self, row_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Whole documents from the next one on, cut at row_tokens: the row begins where a document begins."""
        data = self.data
        n_documents = len(data.synthetic_starts)
        pieces: list[tuple[int, int]] = []
        filled = 0
        while filled < row_tokens + 1:
            index = self.next_document % n_documents
            start = int(data.synthetic_starts[index])
            end = int(data.synthetic_starts[index + 1]) if index + 1 < n_documents else len(data.synthetic_ids)
            pieces.append((start, end))
            filled += end - start
            self.next_document += 1
        ids = np.concatenate([data.synthetic_ids[start:end] for start, end in pieces])[: row_tokens + 1].astype(
            np.int64
        )
        mask = np.concatenate([data.synthetic_mask[start:end] for start, end in pieces])[: row_tokens + 1]
        return ids[:-1], np.where(mask[1:], ids[1:], IGNORED)

    def mixed_row(self, row_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Book text for two to four quarters, then dialogues: questions must be answered at far positions too."""
        n_quarters = int(np.random.default_rng([self.seed, self.next_document]).integers(2, 5))
        book_tokens, book_targets = self.book_row(row_tokens * n_quarters // 4)
        if n_quarters == 4:
            return book_tokens, book_targets
        tokens, targets = self.synthetic_row(row_tokens - len(book_tokens))
        return np.concatenate([book_tokens, tokens]), np.concatenate([book_targets[:-1], [IGNORED], targets])

    def batch(self, *, rows: int, row_tokens: int, book_fraction: float) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens, targets [rows,row_tokens] i64. int(rows * book_fraction) book rows come first, a mixed one last."""
        n_books = int(rows * book_fraction)
        made = [self.book_row(row_tokens) for _ in range(n_books)]
        made += [self.synthetic_row(row_tokens) for _ in range(rows - n_books - 1)]
        made.append(self.mixed_row(row_tokens))
        tokens, targets = (np.stack(arrays) for arrays in zip(*made, strict=True))
        return torch.from_numpy(tokens), torch.from_numpy(targets)
