"""Distances between heads' maps against the definition, and groups of planted duplicates."""

import itertools

import numpy as np
import pytest
import torch

import inspections
import multihead as mh
from multihead.heads import similarity
from multihead.heads.comparing.similarity import clusters

LAYERS, HEADS, ROWS, COLUMNS = 2, 3, 5, 7


def random_maps(seed=0, layers=LAYERS, heads=HEADS):
    random = np.random.default_rng(seed)
    return random.dirichlet(np.full(COLUMNS, 0.3), (layers, heads, ROWS))


def divergence(one, other):
    """Of two distributions, in bits, as the textbook writes it."""
    middle = (one + other) / 2

    def relative(p):
        return sum(x * np.log2(x / m) for x, m in zip(p, middle, strict=True) if x > 0)

    return (relative(one) + relative(other)) / 2


def expected(texts):
    """The distance of every two heads from the definition, row by row."""
    flat = [maps.reshape(-1, *maps.shape[2:]) for maps in texts]
    count = len(flat[0])
    found = np.zeros((count, count))
    for one, other in itertools.product(range(count), repeat=2):
        rows = [
            divergence(p, q) for maps in flat for p, q in zip(maps[one], maps[other], strict=True)
        ]
        found[one, other] = np.sqrt(max(0.0, np.mean(rows)))
    return found


def test_distances_are_the_definition():
    found = similarity(random_maps())
    assert found.heads == tuple(itertools.product(range(LAYERS), range(HEADS)))
    np.testing.assert_allclose(found.distances, expected([random_maps()]), rtol=1e-12)
    assert found.distance((0, 2), (1, 0)) == found.distances[2, 3]
    assert found.texts == 1


def test_several_texts_are_averaged_as_divergences():
    texts = [random_maps(1), random_maps(2)]
    found = similarity(texts)
    np.testing.assert_allclose(found.distances, expected(texts), rtol=1e-12)
    assert found.texts == 2


def test_equal_heads_have_distance_zero_and_opposite_ones_one():
    maps = random_maps()
    maps[1, 2] = maps[0, 0]
    maps[0, 1], maps[1, 0] = 0.0, 0.0
    maps[0, 1, :, 0] = 1.0
    maps[1, 0, :, 3] = 1.0
    found = similarity(maps)
    assert found.distance((0, 0), (1, 2)) == 0.0
    assert found.distance((0, 1), (1, 0)) == pytest.approx(1.0, abs=1e-15)
    assert (found.distances == found.distances.T).all()
    assert (np.diag(found.distances) == 0).all()
    assert found.nearest((0, 0), 1) == [((1, 2), 0.0)]


def test_it_is_a_metric():
    distances = similarity(random_maps(5, 3, 4)).distances
    for one, between, other in itertools.permutations(range(12), 3):
        ways = distances[one, between] + distances[between, other]
        assert distances[one, other] <= ways + 1e-12


def test_what_a_sink_takes_is_an_outcome():
    share = np.array([0.2, 0.9])[None, :, None, None]
    maps = random_maps()[:1, :1] * share
    whole = np.concatenate([maps, 1 - maps.sum(-1, keepdims=True)], -1)
    found = similarity(maps).distances
    np.testing.assert_allclose(found, expected([whole]), rtol=1e-12)
    assert found[0, 1] > 0.4


def test_hidden_cells_rows_and_pruned_heads():
    maps = random_maps()
    hidden = maps.copy()
    hidden[..., 5:] = 0
    hidden /= hidden.sum(-1, keepdims=True)
    wanted = similarity(hidden).distances
    hidden[..., 5:] = np.nan
    padded = np.concatenate([hidden, np.full_like(hidden[..., :1, :], np.nan)], -2)
    np.testing.assert_array_equal(similarity(padded).distances, wanted)
    padded[0, 1] = np.nan
    without = similarity(padded)
    assert without.heads == ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2))
    np.testing.assert_allclose(without.distances, np.delete(np.delete(wanted, 1, 0), 1, 1))


def test_maps_of_attention_itself():
    """Two heads with the same queries and keys are one head, whatever stands around them."""
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 1, 4, 150, 8, generator=generator)
    query[:, 3], key[:, 3] = query[:, 1], key[:, 1]
    mask = mh.Causal()
    result = mh.attention_with_stats(query, key, key, mask=mask)
    maps = mh.attention_map(query, key, result.stats["lse"], mask=mask)
    found = similarity(maps)
    assert found.distance((0, 1), (0, 3)) == 0.0
    [group] = found.groups(0.01)
    assert group.heads == ((0, 1), (0, 3))
    assert found.distance((0, 0), (0, 1)) > 0.1


def test_planted_groups_are_found():
    maps = random_maps(7, 3, 4)
    noise = random_maps(8, 3, 4)
    planted = [(0, 0), (1, 1), (2, 3)], [(0, 2), (2, 1)]
    for group in planted:
        for head in group[1:]:
            maps[head] = 0.98 * maps[group[0]] + 0.02 * noise[head]
    found = similarity(maps)
    for linkage in ("average", "single", "complete"):
        assert [it.heads for it in found.groups(0.2, linkage)] == [tuple(it) for it in planted]
    assert found.groups(0.0) == []
    [everything] = found.groups(1.0)
    assert len(everything) == 12
    assert everything.diameter == found.distances.max()
    assert "12 heads on one text, groups at 0.2 (average linkage): 2, of 5 heads; 7 stand" in str(
        found
    )
    assert "3 like L2H3, at most 0.045 apart: L0H0, L1H1, L2H3" in str(found)


def by_definition(distances, threshold, linkage):
    """Clusters whose distances are formed again from their members at every step."""
    reduce = {"average": np.mean, "single": np.min, "complete": np.max}[linkage]
    found = [[place] for place in range(len(distances))]
    while len(found) > 1:
        pairs = list(itertools.combinations(range(len(found)), 2))
        each = [reduce(distances[np.ix_(found[a], found[b])]) for a, b in pairs]
        if min(each) > threshold:
            break
        one, other = pairs[int(np.argmin(each))]
        found[one] = sorted(found[one] + found.pop(other))
    return sorted(found)


@pytest.mark.parametrize("linkage", ["average", "single", "complete"])
@pytest.mark.parametrize("threshold", [0.2, 0.45, 0.6])
def test_clusters_are_those_of_the_definition(linkage, threshold):
    points = np.random.default_rng(11).uniform(size=(23, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    wanted = by_definition(distances, threshold, linkage)
    assert clusters(distances, threshold, linkage) == wanted
    assert 1 < len(wanted) < 23 or linkage == "single"


def test_inspections():
    view = inspections.made_up(97, layers=2, heads=3)
    found = similarity(view)
    np.testing.assert_array_equal(found.distances, similarity(view.maps["mass"]).distances)
    assert len(found.heads) == 6
    with pytest.raises(mh.ArgumentError, match=r"has no maps; make it with .*report=True"):
        similarity(inspections.made_up(97, layers=2, heads=3, maps={}))


def test_one_head_alone():
    found = similarity(random_maps(0, 1, 1))
    assert found.distances.tolist() == [[0.0]]
    assert found.groups() == []


def test_refusals():
    maps = random_maps()
    with pytest.raises(
        mh.ArgumentError, match=r"\[layers, heads, rows, columns\]; got \[3, 5, 7\]"
    ):
        similarity(maps[0])
    with pytest.raises(mh.ArgumentError, match='similarity compares "mass" maps'):
        similarity(maps * 2)
    with pytest.raises(mh.ArgumentError, match='similarity compares "mass" maps'):
        similarity(np.log2(maps))
    with pytest.raises(mh.ArgumentError, match="same layers and heads; got 1 x 3 and 2 x 3"):
        similarity([maps, maps[:1]])
    with pytest.raises(mh.ArgumentError, match="maps is empty"):
        similarity([])
    with pytest.raises(mh.ArgumentError, match="hold no head"):
        similarity(maps * np.nan)
    found = similarity(maps)
    with pytest.raises(mh.ArgumentError, match="threshold must be a distance from 0 to 1; got 2"):
        found.groups(2)
    with pytest.raises(mh.ArgumentError, match="linkage must be one of average, single, complete"):
        found.groups(0.2, "ward")
    with pytest.raises(mh.ArgumentError, match=r"no head \(0, 9\)"):
        found.nearest((0, 9))
