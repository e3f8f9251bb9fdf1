"""Starts of particles: singular vectors, their signs, transfer matrices, NNDSVD."""

import numpy as np
import pytest
from scipy import sparse

from daskfactor import SerialExecutor, ThreadsExecutor, TweedieNMF, as_blocks
from daskfactor.errors import DataError, OptionError
from daskfactor.executors.state import make_state
from daskfactor.inference import singular
from daskfactor.inference.singular import dense_svd, prepare_starts, truncated_svd
from tests.executors.audit import AuditExecutor
from tests.pairwise import pairwise
from tests.refusals import refused

SERIAL = SerialExecutor()


def low_rank(shape=(40, 30), rank=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((shape[0], rank)) @ rng.random((rank, shape[1]))


def with_gaps(X, share=0.3, seed=1):
    return np.where(np.random.default_rng(seed).random(X.shape) < share, np.nan, X)


def counts(seed=2):
    return np.random.default_rng(seed).poisson(0.7, (30, 24)).astype(float)


def product(found):
    return (found.left * found.values) @ found.right


@pairwise(kind=["dense", "sparse", "wide"], rank=[1, 3, 14], blocks=[1, 4])
def test_singular_vectors_are_those_of_the_whole(kind, rank, blocks):
    X = counts()
    given = {"dense": X, "sparse": sparse.csr_array(X), "wide": X.T}[kind]
    whole = given.toarray() if kind == "sparse" else given
    unstored = "zero" if kind == "sparse" else None
    with as_blocks(given, blocks, dtype="float64", unstored=unstored) as data:
        found = truncated_svd(SERIAL, data, rank)
    exact = dense_svd(whole, rank)
    np.testing.assert_allclose(found.values, exact.values, rtol=1e-6)
    np.testing.assert_allclose(product(found), product(exact), atol=1e-4)
    assert (np.diff(found.values) <= 0).all()
    for mine, its in zip(found, singular.consistent_signs(found), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("kind", ["dense", "unstored", "stored"])
def test_missing_entries_are_filled_in(kind):
    X = with_gaps(counts() + 1.0)
    rng = np.random.default_rng(3)
    W, H = rng.random((30, 2)), rng.random((2, 24))
    given, unstored = X, None
    if kind == "unstored":
        rows, cols = np.nonzero(np.isfinite(X))
        given = sparse.csr_array((X[rows, cols], (rows, cols)), shape=X.shape)
        unstored = "missing"
    elif kind == "stored":
        given, unstored = sparse.csr_array(X), "zero"
    with as_blocks(given, 3, dtype="float64", unstored=unstored) as data:
        fill = make_state(data.grid, W, np.ascontiguousarray(H.T))
        found = truncated_svd(SERIAL, data, 3, fill=fill)
    exact = dense_svd(np.where(np.isnan(X), W @ H, X), 3)
    np.testing.assert_allclose(product(found), product(exact), atol=1e-5)


def test_same_vectors_from_every_executor():
    with as_blocks(counts(), 4, dtype="float32") as data:
        one = truncated_svd(SERIAL, data, 3, seed=5)
        for executor in (AuditExecutor(), ThreadsExecutor(2)):
            other = truncated_svd(executor, data, 3, seed=5)
            for mine, its in zip(one, other, strict=True):
                np.testing.assert_array_equal(mine, its)


def bro_acar_kolda(X, found):
    """Algorithm 1 of the paper, with its residuals and its loops."""
    left, right = found.left.copy(), found.right.copy()
    for k in range(len(found.values)):
        others = [m for m in range(len(found.values)) if m != k]
        residual = X - (found.left[:, others] * found.values[others]) @ found.right[others]
        inner = [found.left[:, k] @ residual[:, j] for j in range(X.shape[1])]
        s_left = sum(np.sign(own) * own**2 for own in inner)
        inner = [found.right[k] @ residual[i] for i in range(X.shape[0])]
        s_right = sum(np.sign(own) * own**2 for own in inner)
        if s_left * s_right < 0:
            if abs(s_left) < abs(s_right):
                s_left = -s_left
            else:
                s_right = -s_right
        left[:, k] *= np.sign(s_left)
        right[k] *= np.sign(s_right)
    return singular.Singular(left, found.values, right)


@pytest.mark.parametrize("seed", range(5))
def test_signs_are_those_of_bro_acar_and_kolda(seed):
    X = np.random.default_rng(seed).gamma(0.5, size=(11, 8))
    exact = dense_svd(X, 5)
    flips = np.random.default_rng(seed).choice([-1.0, 1.0], 5)
    turned = singular.Singular(exact.left * flips, exact.values, exact.right * flips[:, None])
    expected = bro_acar_kolda(X, exact)
    for one in (exact, turned):
        for mine, its in zip(singular.consistent_signs(one), expected, strict=True):
            np.testing.assert_allclose(mine, its, atol=1e-12)


def test_data_without_singular_vectors():
    with as_blocks(np.zeros((5, 4)) + 0.0, 1) as data:
        refused(DataError, "zero", truncated_svd, SERIAL, data, 2)
    with as_blocks(counts()[:3], 1) as data:
        refused(OptionError, "has 3", prepare_starts, SERIAL, data, TweedieNMF(4), "nndsvd", 1, 0)


def test_transfer_matrices_are_kept_and_begin_alike():
    many, few = singular.learn_transfer(3, 12), singular.learn_transfer(3, 7)
    assert many[0].shape == many[1].shape == (12, 3, 3)
    assert singular.learn_transfer(3, 12) is many
    np.testing.assert_array_equal(many[0][:7], few[0])
    np.testing.assert_array_equal(many[1][:7], few[1])
    with pytest.raises(ValueError, match="read-only"):
        many[0][0] = 0.0
    # On low-rank data W H is close to the product of both halves of the decomposition.
    for w, h in zip(*many, strict=True):
        assert np.abs(w @ h - np.eye(3)).max() < 0.6


@pytest.mark.parametrize("shape", [(300, 200), (40, 500)])
def test_transfer_carries_to_data_of_other_sizes(shape):
    X = 1e3 * low_rank(shape, 3, seed=4)
    found = singular.consistent_signs(dense_svd(X, 3))
    transfer = singular.learn_transfer(3, 10)
    rng = np.random.default_rng(0)
    errors = {"transfer": [], "random": []}
    for pair in zip(*transfer, strict=True):
        W, H = singular.q_transform(found, [pair], 3, rng)
        errors["transfer"].append(np.linalg.norm(X - W @ H) / np.linalg.norm(X))
        W, H = singular.random_start(shape, 3, X.mean(), rng)
        errors["random"].append(np.linalg.norm(X - W @ H) / np.linalg.norm(X))
    assert max(errors["transfer"]) < 0.5 * min(errors["random"])


def test_a_start_is_the_absolute_value_of_turned_halves_of_any_number_of_components():
    X = low_rank()
    found = singular.consistent_signs(dense_svd(X, 3))
    basis, weights = singular.halves(found, 3)
    np.testing.assert_allclose(basis @ weights, X, atol=1e-10)
    sizes = np.linalg.norm(basis, axis=0), np.linalg.norm(weights, axis=1)
    np.testing.assert_allclose(sizes[0], sizes[1])
    for turn in zip(*singular.learn_transfer(3, 4), strict=True):
        (W, H), more, fewer = (
            singular.q_transform(found, [turn], rank, np.random.default_rng(0))
            for rank in (3, 7, 2)
        )
        np.testing.assert_array_equal(W, np.abs(basis @ turn[0]))
        np.testing.assert_array_equal(H, np.abs(turn[1] @ weights))
        for mine, its in ((more[0][:, :3], W), (more[1][:3], H), (fewer[0], W[:, :2])):
            np.testing.assert_array_equal(mine, its)
        np.testing.assert_array_equal(fewer[1], H[:2])
        assert 0 < (more[0][:, 3:] @ more[1][3:]).max() < 0.01 * (W @ H).mean()


@pytest.mark.parametrize(("width", "count"), [(3, 4), (7, 4), (7, 1), (12, 9)])
def test_components_of_several_transfers(width, count):
    X = low_rank()
    with as_blocks(X, 2, dtype="float64") as data:
        model = TweedieNMF(width)
        made = prepare_starts(SERIAL, data, model, "q_transform", count, 0, stacked=True)
        own = prepare_starts(SERIAL, data, TweedieNMF(3), "q_transform", count, 0)
        starts = [made(number) for number in range(count)]
        for number, (W, H) in enumerate(starts):
            assert (W.shape, H.shape) == ((40, width), (width, 30))
            first, _ = own(number)
            np.testing.assert_allclose(W[:, :3] * np.sqrt(-(-width // 3)), first)
            error = np.linalg.norm(X - W @ H) / np.linalg.norm(X)
            assert error < 0.35  # the last transfer may lack components
            lengths = W / np.linalg.norm(W, axis=0)
            assert (lengths.T @ lengths - np.eye(width)).max() < 1 - 1e-9  # no component twice


@pytest.mark.parametrize("rank", [1, 4])
def test_nndsvd_is_that_of_scikit_learn(rank):
    nmf = pytest.importorskip("sklearn.decomposition._nmf")
    X = low_rank((30, 24), 4)  # scikit-learn's singular vectors are random ones, exact here
    W, H = singular.nndsvd(singular.consistent_signs(dense_svd(X, rank)), rank)
    expected_w, expected_h = nmf._initialize_nmf(X, rank, init="nndsvd", random_state=0)
    np.testing.assert_allclose(W, expected_w, atol=1e-5)
    np.testing.assert_allclose(H, expected_h, atol=1e-5)
    exact = dense_svd(X, rank)
    turned = singular.nndsvd(singular.Singular(-exact.left, exact.values, -exact.right), rank)
    for mine, its in zip((W, H), turned, strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-8)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", ["q_transform", "random", "nndsvdar", "nndsvd"])
def test_a_start_depends_on_its_number_and_the_seed_alone(kind, stacked):
    with as_blocks(counts(), 2) as data:
        many = prepare_starts(SERIAL, data, TweedieNMF(4), kind, 40, 11, stacked=stacked)
        few = prepare_starts(SERIAL, data, TweedieNMF(4), kind, 3, 11, stacked=stacked)
        other = prepare_starts(SERIAL, data, TweedieNMF(4), kind, 3, 12, stacked=stacked)
        assert np.allclose(few(1)[0], other(1)[0], atol=1e-5) == (kind == "nndsvd")
        for number in (2, 0, 1):
            for mine, its in zip(many(number), few(number), strict=True):
                np.testing.assert_array_equal(mine, its)
                assert mine.dtype == np.float32
                assert (mine >= 0).all()
                assert np.isfinite(mine).all()
        W, H = many(0)
        assert (W.shape, H.shape) == ((30, 4), (4, 24))
        alike = np.array_equal(many(0)[0], many(1)[0])
        assert alike == (kind == "nndsvd")
        if kind == "nndsvdar":
            assert (W > 0).all()


def test_starts_scale_with_the_data():
    X = counts()
    for kind in ("q_transform", "random", "nndsvdar"):
        with as_blocks(X, 2, dtype="float64") as data:
            W, H = prepare_starts(SERIAL, data, TweedieNMF(4), kind, 2, 0)(1)
        for factor in (1e-8, 1e6):
            with as_blocks(factor * X, 2, dtype="float64") as data:
                scaled_w, scaled_h = prepare_starts(SERIAL, data, TweedieNMF(4), kind, 2, 0)(1)
            np.testing.assert_allclose(scaled_w, np.sqrt(factor) * W, rtol=1e-4)
            np.testing.assert_allclose(scaled_h, np.sqrt(factor) * H, rtol=1e-4)
