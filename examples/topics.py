"""Topics of a set of documents, and the number of topics that the documents support.

Latent Dirichlet allocation is an allocation model, ``"d -> r, r -> w"``: a document draws a topic,
and the topic draws a word. The number of topics is chosen by the variational bound of the log
evidence, the best of several starts for each number. Sequential Monte Carlo checks it on a random
share of the words, as many as particles can handle.

    python examples/topics.py [--documents FILE.npz] [--topics 2 5 10 15 20 30] [--tokens 250]

Without a file, the documents are the sections of the Python language reference, which is part of
every interpreter. A file has a matrix of documents by words as ``data``, ``indices``, ``indptr``
and ``shape``, and the words as ``vocab``.
"""

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

import daskfactor as dfac

COMMON = 0.35
"""Largest share of the documents with a word that is used."""
RARE = 4
"""Smallest number of documents with a word that is used."""


class Documents(NamedTuple):
    """Counts of documents by words, and the words."""

    counts: Any
    words: NDArray[np.str_]


def documents_of_python() -> Documents:
    """Sections of the language reference, without words that all or few of them have."""
    from pydoc_data.topics import topics

    bags = [Counter(re.findall(r"[a-z]{3,}", text.lower())) for text in topics.values()]
    frequency = Counter(word for bag in bags for word in bag)
    words = sorted(w for w, n in frequency.items() if RARE <= n <= COMMON * len(bags))
    place = {word: number for number, word in enumerate(words)}
    entries = [
        (row, place[word], n)
        for row, bag in enumerate(bags)
        for word, n in bag.items()
        if word in place
    ]
    rows, cols, values = np.array(entries, np.int64).T
    counts = sparse.coo_array((values, (rows, cols)), shape=(len(bags), len(words))).tocsr()
    return Documents(counts[counts.sum(axis=1) > 0], np.array(words))


def documents_of_file(path: str) -> Documents:
    """Read a matrix from a file, without the words that most documents have."""
    with np.load(path) as file:
        parts = (file["data"].astype(np.int64), file["indices"].astype(np.int64))
        counts = sparse.csr_array((*parts, file["indptr"].astype(np.int64)), tuple(file["shape"]))
        words = np.array([w.decode() if isinstance(w, bytes) else str(w) for w in file["vocab"]])
    found = np.bincount(counts.indices, minlength=counts.shape[1])
    telling = np.flatnonzero((found >= RARE) & (found <= COMMON * counts.shape[0]))
    return Documents(counts[:, telling], words[telling])


def estimates(X: Any, topics: Sequence[int], method: Any) -> list[dfac.Evidence]:
    """Log evidence at every number of topics; what it would warn of is in the table."""
    found = []
    for number in topics:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = dfac.AllocationModel.topics(number)
            found.append(dfac.log_evidence(X, model, method, random_seed=0, progressbar=False))
    return found


def top_words(one: dfac.Evidence, words: NDArray[np.str_], count: int) -> list[dict[str, float]]:
    """Return the likeliest words of every topic with their probabilities, largest topic first."""
    table = one.trace["table_w"].transpose("r", "w").values
    weight = one.trace["table_r"].transpose("d", "r").values.mean(axis=0)
    return [
        {str(words[w]): float(table[r, w]) for w in np.argsort(-table[r])[:count]}
        for r in np.argsort(-weight)
    ]


def tell(
    documents: Documents,
    topics: Sequence[int],
    bounds: list[dfac.Evidence],
    checks: list[dfac.Evidence],
) -> int:
    """Print the tables and the topics; return the position of the best number of topics."""
    rows, cols = documents.counts.shape
    print(f"{rows} documents, {cols} words, {int(documents.counts.sum())} tokens")
    print(f"log evidence (nats)\ntopics       bound   {checks[0].trace.attrs['tokens']} tokens")
    for number, bound, check in zip(topics, bounds, checks, strict=True):
        error = f"{check.value:.1f} ± {check.standard_error:.1f}"
        print(f"{number:6d}{bound.value:12.0f}   {error}")
    best = int(np.argmax([one.value for one in bounds]))
    few = topics[int(np.argmax([one.value for one in checks]))]
    print(
        f"\nThe bound is largest for {topics[best]} topics; the evidence of the thinned tokens is "
        f"largest for {few}.\n"
    )
    for number, found in enumerate(top_words(bounds[best], documents.words, 9), 1):
        print(f"  {number:2d}  {' '.join(found)}")
    return best


def picture(
    path: str, documents: Documents, topics: Sequence[int], bounds: list[dfac.Evidence], best: int
) -> None:
    """Plot the bound over the number of topics, and the words of the largest ones."""
    import matplotlib.pyplot as plt

    shown = top_words(bounds[best], documents.words, 10)[:6]
    figure = plt.figure(figsize=(11, 6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2))
    curve = left.subplots()
    curve.plot(topics, [one.value for one in bounds], "o-")
    curve.set(title="Variational bound", xlabel="topics", ylabel="log evidence (nats)")
    curve.set_xticks(list(topics))
    panels = right.subplots(2, 3)
    right.suptitle("Most likely words of the largest topics")
    for panel, topic in zip(panels.flat, shown, strict=False):
        panel.barh(list(topic)[::-1], list(topic.values())[::-1], color="C0")
        panel.tick_params(labelsize=8)
    for panel in panels.flat[len(shown) :]:
        panel.axis("off")
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", help="npz file of a matrix of counts and its words")
    parser.add_argument(
        "--topics", type=int, nargs="+", default=[2, 5, 10, 15, 20, 30], help="numbers"
    )
    parser.add_argument(
        "--starts", type=int, default=8, help="number of starts of the variational bound"
    )
    parser.add_argument(
        "--tokens", type=int, default=250, help="number of tokens for the particles"
    )
    parser.add_argument("--picture", default="topics.png", help="image file to write")
    options = parser.parse_args()
    if options.documents:
        documents = documents_of_file(options.documents)
    else:
        documents = documents_of_python()
    X = documents.counts
    bounds = estimates(X, options.topics, dfac.VariationalBayes(starts=options.starts))
    share = min(1.0, options.tokens / float(X.sum()))
    particles = dfac.SequentialMonteCarlo(target=0.5, max_particles=2**14, thin=share)
    checks = estimates(X, options.topics, particles)
    best = tell(documents, options.topics, bounds, checks)
    picture(options.picture, documents, options.topics, bounds, best)


if __name__ == "__main__":
    main()
