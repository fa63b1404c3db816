"""Connectionist temporal classification: reading a string from per-column probabilities, and the string's probability.

Class 0 is the blank. Reference: A. Graves et al., "Connectionist Temporal Classification", ICML 2006.
"""

import numpy as np


def greedy_read(probabilities: np.ndarray, alphabet: str) -> list[str]:
    """Take the best class of each column, merge repeats, drop blanks.

    Args:
        probabilities: [B, T, 1 + len(alphabet)]; class 0 is the blank, class k + 1 the alphabet's character k.
        alphabet: the characters.

    Returns:
        B strings.
    """
    best = probabilities.argmax(axis=-1)
    starts = np.concatenate([np.ones_like(best[:, :1], bool), best[:, 1:] != best[:, :-1]], axis=1)
    return ["".join(alphabet[k - 1] for k in row[new & (row != 0)]) for row, new in zip(best, starts, strict=True)]


def log_probability(log_probabilities: np.ndarray, targets: list[np.ndarray]) -> np.ndarray:
    """Return the log of the summed probability of all alignments of each target, by the exact forward algorithm.

    With l' the target interleaved with blanks (2 L + 1 symbols) and y the column probabilities (equations 6 and 7),

        alpha[t, s] = y[t, l'[s]] * (alpha[t-1, s] + alpha[t-1, s-1] + alpha[t-1, s-2])

    where the last term is there only if l'[s] is neither blank nor equal to l'[s-2]; p = alpha[T, -1] + alpha[T, -2].

    Args:
        log_probabilities: [B, T, K], class 0 the blank; -inf is allowed.
        targets: B integer arrays of classes 1..K-1, each with at least one; lengths may differ.

    Returns:
        float64 [B]; -inf where the target does not fit into T columns.
    """
    lengths = np.array([len(target) for target in targets])
    symbols = np.zeros((len(targets), 2 * lengths.max() + 1), np.int64)  # blanks at the even places
    for row, target in zip(symbols, targets, strict=True):
        row[1 : 2 * len(target) : 2] = target
    emitted = np.take_along_axis(log_probabilities.astype(np.float64), symbols[:, None, :], axis=2)  # [B, T, S]

    may_skip = np.zeros(symbols.shape, bool)
    may_skip[:, 2:] = (symbols[:, 2:] != 0) & (symbols[:, 2:] != symbols[:, :-2])
    alpha = np.full(symbols.shape, -np.inf)
    alpha[:, :2] = emitted[:, 0, :2]
    for column in range(1, emitted.shape[1]):
        one_before = np.pad(alpha, ((0, 0), (1, 0)), constant_values=-np.inf)[:, :-1]
        two_before = np.pad(alpha, ((0, 0), (2, 0)), constant_values=-np.inf)[:, :-2]
        arrived = np.logaddexp(np.logaddexp(alpha, one_before), np.where(may_skip, two_before, -np.inf))
        alpha = arrived + emitted[:, column]
    rows = np.arange(len(targets))
    return np.logaddexp(alpha[rows, 2 * lengths], alpha[rows, 2 * lengths - 1])
