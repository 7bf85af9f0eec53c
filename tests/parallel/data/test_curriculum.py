"""Curriculum learning through DeepSpeed's sampler."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path

import pytest

from collie_parallel.data.curriculum import curriculum_section
from collie_parallel.data.dataloader import CollieDataLoader
from tests.harness.pool import RankPool
from tests.parallel.data import cases

METRIC = {
    "difficulty_type": "value",
    "clustering_type": "single_cluster",
    "min_difficulty": 1,
    "max_difficulty": 2,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [1, 2], "max_step": [1]},
}
SECTION = {
    "enabled": True,
    "data_sampling": {
        "enabled": True,
        "curriculum_learning": {"enabled": True, "data_cluster_path": "c", "curriculum_metrics": {"length": METRIC}},
    },
}


def steps(passes, epoch):
    """Samples of each optimizer step of two micro-steps, over the data-parallel ranks."""
    micro = [
        list(chain(*(names[:real] for names, real in step))) for step in zip(*(p[epoch] for p in passes), strict=True)
    ]
    return [micro[i] + micro[i + 1] for i in range(0, len(micro), 2)]


@pytest.mark.distributed
def test_difficulty_grows_and_no_layout_changes_the_samples(pool1: RankPool, pool2: RankPool, tmp_path: Path):
    section = cases.curriculum(tmp_path)
    epochs = [0, 1, 0]
    alone = pool1.run(cases.curriculum_pass, section, 1, 1, epochs)
    tensor = pool2.run(cases.curriculum_pass, section, 2, 1, epochs)
    data = pool2.run(cases.curriculum_pass, section, 1, 2, epochs)

    first, second, again = (steps(alone, epoch) for epoch in range(3))
    assert {cases.difficulty(i) for i in chain(*first[:2])} == {1}
    assert {cases.difficulty(i) for i in chain(*first[2:4])} <= {1, 2}
    assert {cases.difficulty(i) for i in chain(*second)} == {1, 2, 3}
    assert again == first != second
    assert all(len(step) == 4 for step in first) and len(first) == cases.SAMPLES // 4
    assert tensor[0] == tensor[1] == alone[0]
    assert [steps(data, epoch) for epoch in range(3)] == [first, second, again]


def test_sections_that_do_not_enable_it_are_left_alone():
    for section in (
        {},
        {"enabled": False, "data_sampling": SECTION["data_sampling"]},
        {"enabled": True, "data_sampling": {"enabled": True}},
        {"enabled": True, "data_routing": {"enabled": True}},
        {"data_efficiency": {}},
    ):
        assert curriculum_section(section) is None


def test_a_whole_configuration_is_taken_too():
    assert curriculum_section({"data_efficiency": SECTION, "zero_optimization": {}}) == SECTION


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("curriculum_learning.data_cluster_path", None, r"curriculum_learning\.data_cluster_path is missing"),
        ("curriculum_learning.curriculum_metrics", None, r"curriculum_metrics is missing"),
        ("curriculum_learning.curriculum_metrics", {}, "curriculum_metrics is empty"),
        ("curriculum_learning.curriculum_metrics.length.difficulty_type", "size", "'size'.*value, percentile"),
        ("curriculum_learning.curriculum_metrics.length.schedule_type", "custom", "'custom'.*fixed_linear"),
        ("curriculum_learning.curriculum_metrics.length.max_difficulty", None, r"length\.max_difficulty is missing"),
        (
            "curriculum_learning.curriculum_metrics.length.clustering_type",
            "schedule_based",
            r"length\.index_to_sample_path is missing",
        ),
        ("curriculum_learning.curriculum_metrics.length.schedule_config", {}, "length: .*'difficulty'"),
        ("dynamic_batching", {"enabled": True}, r"dynamic_batching\.enabled=True"),
    ],
)
def test_fields_that_are_wrong_are_named(path, value, words):
    section = copy.deepcopy(SECTION)
    *parents, name = path.split(".")
    inner = section["data_sampling"]
    for parent in parents:
        inner = inner[parent]
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    with pytest.raises(ValueError, match=words):
        CollieDataLoader([1, 2], 1, data_efficiency_config=section)


def test_it_needs_the_process_groups_and_an_index():
    loader = CollieDataLoader([{"input_ids": [1]}], 1, data_efficiency_config=SECTION)
    with pytest.raises(RuntimeError, match="setup_distribution"):
        list(loader)
    with pytest.raises(ValueError, match="leave sampler out"):
        CollieDataLoader([1, 2], 1, sampler=[0], data_efficiency_config=SECTION)
    with pytest.raises(ValueError, match="stream has no indices"):
        CollieDataLoader(iter([1]), 1, data_efficiency_config=SECTION)
