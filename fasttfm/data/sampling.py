"""Reproducible subword sampling: a new segmentation for every visit of a sentence, the same in every process.

SentencePiece 0.2.3 seeds its sampling per process, so a resumed run would train on other segmentations. Here a sample
depends only on the model's pieces and scores and on a key, the hash of (seed, epoch, sentence, side).

    bpe        BPE-dropout (Provilkov et al. 2020, algorithm 1): drop each possible merge with probability p, apply the
               best of the rest, repeat until all are dropped. p = 0 is SentencePiece's segmentation, 1 characters.
    unigram    Samples a segmentation with probability proportional to P(segmentation)^alpha: forward filtering,
               backward sampling over the lattice of pieces (Kudo 2018, with all segmentations for l).

Input is SentencePiece's own segmentation, hence already normalized. It is cut wherever no piece crosses the cut;
unknown pieces, bytes and user-defined symbols are kept. Each part is a random walk through states (the merges so far,
or the position in the lattice). The outcomes of a state are cached as an alias table (Walker 1977), and all walks of a
batch advance together. One CPU core samples about 100,000 tokens a second for bpe, a million for unigram.
"""

import itertools
import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from fasttfm.data.sentencepiece_model import BPE, BYTE, NORMAL, UNIGRAM, UNUSED, read_model
from fasttfm.data.tokenizer import UNK, Tokenizer
from fasttfm.errors import UserError

_MOST_OUTCOMES = 1 << 22  # cached at a time, about 200 MB in all
_TOGETHER = 500  # sentences between two looks at the size of the cache
_UNKNOWN_PENALTY = 10.0  # SentencePiece's kUnkPenalty


def sentence_keys(seed: int, epoch: int, sentences: np.ndarray, side: int) -> np.ndarray:
    """The random keys of sentences, (len(sentences),) uint64. sentences: indices; side: 0 source, 1 target."""
    base = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
    numbers = sentences.astype(np.uint64) * np.uint64(2) + np.uint64(side)
    return mix(mix(numbers + np.uint64(GOLDEN)) ^ base)


class SubwordSampler:
    """Samples segmentations for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, amount: float) -> None:
        """amount: p for bpe, in [0, 1]; alpha for unigram, at least 0.

        Raises ValueError for any other amount, for word and character models, and for bpe with unused pieces; UserError
        for an imported vocabulary.
        """
        if tokenizer.vocabulary is not None:
            raise UserError("--subword-sampling: an imported vocabulary has a single segmentation: omit the option")
        kind, pieces = read_model(tokenizer.model)
        normal = {piece: score for piece, score, type in pieces if type == NORMAL}
        if kind not in (UNIGRAM, BPE) or (kind == BPE and any(type == UNUSED for _, _, type in pieces)):
            raise ValueError("subword sampling needs a unigram model, or a bpe model without unused pieces")
        if not math.isfinite(amount) or amount < 0 or (kind == BPE and amount > 1):
            raise ValueError(f"amount is {amount}: bpe needs a probability, unigram a number >= 0")
        self._amount = float(amount)
        self._is_bpe = kind == BPE
        self._scores = normal
        self._ids = {piece: i for i, (piece, _, type) in enumerate(pieces) if type == NORMAL}
        self._bytes = {int(piece[3:5], 16): i for i, (piece, _, type) in enumerate(pieces) if type == BYTE}
        # None for pieces that are never re-segmented
        self._texts = [piece if type == NORMAL else None for piece, _, type in pieces]
        self._longest = max(map(len, normal), default=1)
        self._unknown_score = min(normal.values(), default=0.0) - _UNKNOWN_PENALTY
        self._cut = _Cuts(self._texts)
        # 53 random bits never drop more merges in a row
        self._most_merges = math.ceil(53 / -math.log2(amount)) if 0 < amount < 1 else 1
        self._tables: dict[int, tuple[list[float], list[int]]] = {}
        self._reset()

    def sample(self, sentences: Sequence[np.ndarray], keys: np.ndarray) -> list[np.ndarray]:
        """One sampled segmentation per sentence, int64. sentences: SentencePiece's ids; keys: sentence_keys()."""
        if len(sentences) > _TOGETHER:
            parts = (slice(begin, begin + _TOGETHER) for begin in range(0, len(sentences), _TOGETHER))
            return [drawn for part in parts for drawn in self.sample(sentences[part], keys[part])]
        if self._states.size + len(self._parts) >= _MOST_OUTCOMES:
            self._reset()
        lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
        if not lengths.sum():
            return [np.empty(0, dtype=np.int64) for _ in sentences]
        ids = np.concatenate(sentences).astype(np.int64)
        sentence = np.repeat(np.arange(len(lengths)), lengths)
        begins = np.ones(len(ids), dtype=bool)
        begins[1:] = self._cut.between(ids) | (sentence[1:] != sentence[:-1])
        starts = np.flatnonzero(begins)
        sentence = sentence[starts]  # of each part
        number = np.arange(len(starts)) - np.searchsorted(sentence, sentence)  # of each part in its sentence
        part_keys = mix(keys[sentence] + (number + 1).astype(np.uint64) * np.uint64(GOLDEN))
        sizes = np.diff(starts, append=len(ids))
        emissions, part = self._states.walk(self._starts(ids, starts, sizes), part_keys, self._next_state)
        outputs, counts = self._states.emitted(emissions)
        part = np.repeat(part, counts)
        ends = np.cumsum(np.bincount(sentence[part], minlength=len(lengths)))
        outputs = outputs[np.argsort(part, kind="stable")]
        return [_one_unknown(each) for each in np.split(outputs, ends[:-1])]

    def _reset(self) -> None:
        self._states = States(len(self._texts))
        self._parts: dict[bytes, int] = {}
        self._alone = np.full(len(self._texts), UNBUILT, dtype=np.int64)
        self._splits: dict[tuple[str, ...], int] = {}
        self._split_of: dict[int, tuple[str, ...]] = {}

    def _starts(self, ids: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """The first state of each part's walk."""
        nodes = np.where(sizes == 1, self._alone[ids[starts]], UNBUILT)
        for position in np.flatnonzero(nodes == UNBUILT).tolist():
            part = ids[starts[position] : starts[position] + sizes[position]]
            key = part.tobytes()
            if key not in self._parts:
                self._parts[key] = self._start(part.tolist())
            nodes[position] = self._parts[key]
            if len(part) == 1:
                self._alone[part[0]] = nodes[position]
        return nodes

    def _start(self, part: list[int]) -> int:
        if self._texts[part[0]] is None:
            return self._states.add(([1.0], [0]), [END], [part[0]])
        text = "".join(self._texts[i] or "" for i in part)
        return self._split(tuple(text)) if self._is_bpe else self._lattice(text)

    def _spelled(self, character: str) -> list[int]:
        """The ids of a character without a piece: its bytes, or UNK."""
        return [self._bytes[byte] for byte in character.encode()] if self._bytes else [UNK]

    # Unigram

    def _lattice(self, text: str) -> int:
        """Add the states of all positions in text; returns that of position 0."""
        weight = [0.0] * (len(text) + 1)  # log of the summed weights of all segmentations of the rest of the text
        node = [END] * (len(text) + 1)
        for position in range(len(text) - 1, -1, -1):
            weights, following, emissions = [], [], []
            for end in range(position + 1, min(position + self._longest, len(text)) + 1):
                piece = text[position:end]
                if piece in self._scores:
                    weights.append(self._amount * self._scores[piece] + weight[end])
                    emissions.append(self._ids[piece])
                elif end == position + 1:
                    weights.append(self._amount * self._unknown_score + weight[end])
                    emissions.append(self._states.emission(self._spelled(piece)))
                else:
                    continue
                following.append(node[end])
            largest = max(weights)
            shares = [math.exp(each - largest) for each in weights]
            total = sum(shares)
            weight[position] = largest + math.log(total)
            node[position] = self._states.add(alias_table([each / total for each in shares]), following, emissions)
        return node[0]

    # BPE

    def _split(self, split: tuple[str, ...]) -> int:
        """The state after merges have produced this split."""
        if split not in self._splits:
            merges = len(self._merges(split))
            emission = self._states.emission([i for piece in split for i in self._ids_of(piece)])
            following, emits = [UNBUILT] * merges + [END], [-1] * merges + [emission]
            node = self._states.add(self._table(merges), following, emits)
            self._splits[split] = node
            self._split_of[node] = split
        return self._splits[split]

    def _next_state(self, node: int, outcome: int) -> int:
        """The state after a merge."""
        split = self._split_of[node]
        left = self._merges(split)[outcome][1]
        return self._split((*split[:left], split[left] + split[left + 1], *split[left + 2 :]))

    def _merges(self, split: tuple[str, ...]) -> list[tuple[float, int]]:
        """(-score, index of the left piece) of the possible merges, best first, at most _most_merges."""
        joined = map("".join, itertools.pairwise(split))
        candidates = [(-self._scores[piece], i) for i, piece in enumerate(joined) if piece in self._scores]
        return sorted(candidates)[: self._most_merges]

    def _table(self, merges: int) -> tuple[list[float], list[int]]:
        """The alias table of applying each merge, best first, or none."""
        if merges not in self._tables:
            p = self._amount
            self._tables[merges] = alias_table([(1 - p) * p**dropped for dropped in range(merges)] + [p**merges])
        return self._tables[merges]

    def _ids_of(self, piece: str) -> list[int]:
        return [self._ids[piece]] if piece in self._ids else self._spelled(piece)


class _Cuts:
    """Safe cuts of a segmentation: between two characters that are adjacent in no piece."""

    def __init__(self, texts: list[str | None]) -> None:
        numbers: dict[str, int] = {}
        inside = set()
        for text in texts:
            for left, right in itertools.pairwise(text or ""):
                inside.add((numbers.setdefault(left, len(numbers)), numbers.setdefault(right, len(numbers))))
        unseen = len(numbers)
        self._width = unseen + 2
        # characters in no pair, and pieces that are never re-segmented, get numbers that occur in no pair
        self._last = np.array([numbers.get(text[-1], unseen) if text else unseen + 1 for text in texts])
        self._first = np.array([numbers.get(text[0], unseen) if text else unseen + 1 for text in texts])
        self._inside = np.array(sorted(left * self._width + right for left, right in inside) or [-1], dtype=np.int64)

    def between(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids) - 1,) bool: whether the text can be cut between each id and the next."""
        pairs = self._last[ids[:-1]] * self._width + self._first[ids[1:]]
        indices = np.searchsorted(self._inside, pairs).clip(max=len(self._inside) - 1)
        return self._inside[indices] != pairs


def _one_unknown(ids: np.ndarray) -> np.ndarray:
    """Merge adjacent unknown pieces, as SentencePiece does."""
    unknown = ids == UNK
    again = unknown[1:] & unknown[:-1]
    return np.delete(ids, np.flatnonzero(again) + 1) if again.any() else ids


END, UNBUILT = -1, -2  # in place of a state: end of the walk; state is built on first visit
GOLDEN = 0x9E3779B97F4A7C15


class States:
    """Random walks through states, whose outcomes are stored in arrays.

    The outcomes of a state are contiguous in `accept`, `other`, `following` and `emits`: the alias table, the next
    state, and the emission (index of a short list of ids; -1 for none).
    """

    def __init__(self, vocabulary: int) -> None:
        self.first, self.count = array("i"), array("i")
        self.accept, self.other = array("d"), array("i")
        self.following, self.emits = array("i"), array("i")
        # emission i is the single piece i
        self.ids, self.ids_first = array("i", range(vocabulary)), array("i", range(vocabulary + 1))

    @property
    def size(self) -> int:
        return len(self.accept) + len(self.ids)

    def add(self, table: tuple[list[float], list[int]], following: list[int], emits: list[int]) -> int:
        """Add a state; returns its index."""
        begin = len(self.accept)
        self.first.append(begin)
        self.count.append(len(following))
        self.accept.extend(table[0])
        self.other.extend(table[1])
        self.following.extend(following)
        self.emits.extend(emits)
        return len(self.first) - 1

    def emission(self, ids: list[int]) -> int:
        """Add an emission; returns its index."""
        self.ids.extend(ids)
        self.ids_first.append(len(self.ids))
        return len(self.ids_first) - 2

    def walk(
        self, nodes: np.ndarray, keys: np.ndarray, build: Callable[[int, int], int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Walk from each state to the end; returns the emissions in step order, and the walk of each.

        keys: per walk, (len(nodes),) uint64. build(state, outcome) returns the next state.
        """
        walks = np.arange(len(nodes))
        emitted, owners = [], []
        for step in itertools.count(1):
            if not len(walks):
                break
            outcomes = self._draw(nodes, mix(keys + np.uint64(step * GOLDEN % (1 << 64))))
            following = np.frombuffer(self.following, np.int32)[outcomes]
            for position in np.flatnonzero(following == UNBUILT).tolist():
                outcome, node = int(outcomes[position]), int(nodes[position])
                if self.following[outcome] == UNBUILT:
                    self.following[outcome] = build(node, outcome - self.first[node])
                following[position] = self.following[outcome]
            emissions = np.frombuffer(self.emits, np.int32)[outcomes]
            emits = emissions >= 0
            emitted.append(emissions[emits])
            owners.append(walks[emits])
            continues = following >= 0
            walks, nodes, keys = walks[continues], following[continues].astype(np.int64), keys[continues]
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *emitted]), np.concatenate([empty, *owners])

    def _draw(self, nodes: np.ndarray, random: np.ndarray) -> np.ndarray:
        scaled = uniform(random) * np.frombuffer(self.count, np.int32)[nodes]
        column = scaled.astype(np.int64)
        outcomes = np.frombuffer(self.first, np.int32)[nodes] + column
        return np.where(
            scaled - column < np.frombuffer(self.accept, np.float64)[outcomes],
            outcomes,
            outcomes - column + np.frombuffer(self.other, np.int32)[outcomes],
        )

    def emitted(self, emissions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The concatenated ids of emissions, and the number of ids of each."""
        firsts = np.frombuffer(self.ids_first, np.int32)
        begin, counts = firsts[emissions].astype(np.int64), np.diff(firsts)[emissions].astype(np.int64)
        indices = np.arange(counts.sum()) + np.repeat(begin - (np.cumsum(counts) - counts), counts)
        return np.frombuffer(self.ids, np.int32)[indices].astype(np.int64), counts


def alias_table(probabilities: list[float]) -> tuple[list[float], list[int]]:
    """Walker's alias table: draw a column uniformly, accept it with accept[column], else take other[column]."""
    count = len(probabilities)
    accept = [each * count for each in probabilities]
    other = list(range(count))
    small = [position for position, each in enumerate(accept) if each < 1]
    large = [position for position, each in enumerate(accept) if each >= 1]
    while small and large:
        low, high = small.pop(), large[-1]
        other[low] = high
        accept[high] -= 1 - accept[low]
        if accept[high] < 1:
            small.append(large.pop())
    for position in small + large:  # 1 up to rounding
        accept[position] = 1.0
    return accept, other


def mix(numbers: np.ndarray) -> np.ndarray:
    """splitmix64's hash (Steele et al. 2014) of uint64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def uniform(numbers: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) of random uint64."""
    return (numbers >> np.uint64(11)) * 2.0**-53
