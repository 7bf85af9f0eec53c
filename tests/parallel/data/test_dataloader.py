"""CollieDataLoader: one process plays the data-parallel ranks one after the other."""

from __future__ import annotations

import contextlib
import inspect
from itertools import chain
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from collie_parallel.data.batch import Batch, mask_repeats
from collie_parallel.data.dataloader import CollieDataLoader
from collie_parallel.topology import Env


@contextlib.contextmanager
def as_rank(rank, ranks, seed=42, stages=1):
    answers = {"dp_rank": rank, "dp_size": ranks, "seed": seed, "pp_size": stages}
    with contextlib.ExitStack() as stack:
        for name, value in answers.items():
            stack.enter_context(mock.patch.object(Env, name, property(lambda self, value=value: value)))
        yield


def samples(n):
    """Sample i has i % 3 + 1 tokens, all i + 1."""
    return [{"input_ids": [i + 1] * (i % 3 + 1), "labels": [i + 1] * (i % 3 + 1)} for i in range(n)]


def names(batch):
    return [int(row.max()) - 1 for row in batch["input_ids"]]


def real_names(batch):
    return names(batch)[: batch.real]


def run(ranks, dataset, *args, epoch=0, **kwargs):
    """All batches of each rank."""
    passes = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        with as_rank(rank, ranks):
            loader = CollieDataLoader(dataset, *args, **kwargs)
            loader.set_epoch(epoch)
            batches = list(loader)
            if hasattr(dataset, "__len__"):
                assert len(loader) == len(batches)
        passes.append(batches)
    return passes


def steps_of(passes, accumulation):
    """Names of the real samples of each optimizer step, over all ranks."""
    micro_steps = [[name for batch in step for name in real_names(batch)] for step in zip(*passes, strict=True)]
    return [list(chain(*micro_steps[i : i + accumulation])) for i in range(0, len(micro_steps), accumulation)]


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(samples(self.n))


class Faulty(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise LookupError("sample two is broken")
        return samples(4)[index]


@given(
    n=st.integers(1, 40),
    ranks=st.integers(1, 4),
    rows=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    stream=st.booleans(),
)
def test_a_step_has_the_samples_it_has_in_one_process(n, ranks, rows, accumulation, shuffle, drop_last, epoch, stream):
    size = ranks * rows * accumulation
    if drop_last and n < size:
        n += size
    if stream:
        shuffle = False
    dataset = Stream(n) if stream else samples(n)
    [alone] = run(1, samples(n), size, shuffle=shuffle, drop_last=drop_last, epoch=epoch)

    passes = run(ranks, dataset, rows, accumulation, shuffle=shuffle, drop_last=drop_last, epoch=epoch)

    assert len({len(batches) for batches in passes}) == 1
    assert steps_of(passes, accumulation) == [names(batch) for batch in alone]
    seen = sorted(name for batch in alone for name in names(batch))
    assert seen == sorted(set(seen)) and len(seen) == (n - n % size if drop_last else n)
    for batch in (batch for batches in passes for batch in batches):
        assert isinstance(batch, Batch) and batch.size == len(batch["input_ids"]) <= rows
        assert (batch["labels"][batch.real :] == -100).all()
        for row, name in zip(batch["labels"], real_names(batch), strict=False):
            assert row[row != -100].tolist() == [name + 1] * (name % 3 + 1)


@pytest.mark.parametrize("n", [1, 3])
def test_fewer_samples_than_ranks(n):
    passes = run(4, samples(n), 2, 3)
    assert [len(batches) for batches in passes] == [1] * 4
    assert [batches[0].real for batches in passes] == [1] * n + [0] * (4 - n)
    assert all(batches[0].size == 1 for batches in passes)
    assert steps_of(passes, 1) == [list(range(n))]


def test_a_batch_larger_than_the_dataset():
    [batches] = run(1, samples(3), 8)
    assert [names(batch) for batch in batches] == [[0, 1, 2]]
    assert batches[0].real == batches[0].size == 3


def test_the_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch, global_seed, workers=0):
        torch.manual_seed(global_seed)
        with as_rank(0, 1, seed):
            loader = CollieDataLoader(samples(30), 5, shuffle=True, num_workers=workers)
            loader.set_epoch(epoch)
            return [name for batch in loader for name in names(batch)]

    first = order(1, 0, 10)
    assert order(1, 0, 11) == first
    assert order(1, 0, 12, workers=2) == first
    assert order(1, 1, 10) != first and order(2, 0, 10) != first
    assert sorted(order(1, 1, 10)) == list(range(30))


def test_iterating_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    for sampler in (None, RandomSampler(range(6))):
        list(CollieDataLoader(samples(6), 2, sampler=sampler))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pipeline_batch_holds_the_whole_step():
    with as_rank(0, 1, stages=2):
        loader = CollieDataLoader(samples(14), 2, 3)
        batches = list(loader)
        assert len(loader) == 3
    assert [names(batch) for batch in batches] == [list(range(6)), list(range(6, 12)), [12, 13]]


def test_samplers_are_split_over_the_ranks():
    picked = [5, 3, 1, 4, 0]
    passes = run(2, samples(6), 1, 2, sampler=picked)
    assert steps_of(passes, 2) == [[5, 3, 1, 4], [0]]


def test_a_random_sampler_gives_all_ranks_one_order():
    passes = run(3, samples(12), 2, sampler=RandomSampler(range(12)))
    flat = list(chain(*steps_of(passes, 1)))
    assert sorted(flat) == list(range(12)) and flat != list(range(12))


def test_the_samplers_epoch_is_set():
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0, seed=3)
    loader = CollieDataLoader(samples(8), 8, sampler=sampler)
    first = [names(batch) for batch in loader]
    loader.set_epoch(1)
    assert [names(batch) for batch in loader] != first


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("source", ["list", "stream"])
def test_workers_change_nothing(workers, source):
    dataset = samples(11) if source == "list" else Stream(11)
    expected, loaded = (run(2, dataset, 2, 2, num_workers=number) for number in (0, workers))
    for batches, others in zip(expected, loaded, strict=True):
        assert [(names(b), b.real, b.size) for b in batches] == [(names(b), b.real, b.size) for b in others]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_raises_comes_out(workers):
    with pytest.raises(LookupError, match="sample two is broken"):
        list(CollieDataLoader(Faulty(), 2, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_must_return_a_dict(workers):
    loader = CollieDataLoader([1, 2], 2, collate_fn=_sum, num_workers=workers)
    with pytest.raises(TypeError, match="must return a dict; it returned int: 3"):
        list(loader)


def _sum(batch):
    return sum(batch)


def test_the_documented_collate_function_with_one_tensor_as_inputs_and_labels():
    def collate(batch):
        assert isinstance(batch, list)
        ids = torch.tensor([[len(text)] * 2 for text in batch])
        return {"input_ids": ids, "labels": ids}

    with as_rank(1, 2):
        [batch] = CollieDataLoader(["one"], 1, collate_fn=collate)
    assert batch.real == 0
    assert batch["input_ids"].tolist() == [[3, 3]] and batch["labels"].tolist() == [[-100, -100]]


def test_repeats_are_masked_with_what_the_padder_pads_labels_with():
    from collie_parallel.data.padder import ColliePadder

    with as_rank(1, 2):
        [batch] = CollieDataLoader(samples(1), 1, collate_fn=ColliePadder({"labels": -1}))
    assert batch["labels"].tolist() == [[-1]]


def test_labels_of_options_are_masked_and_others_left():
    batch = Batch({"labels": (torch.ones(2, 3).long(), [torch.ones(2).long()])}, real=1, size=2)
    masked = mask_repeats(batch)["labels"]
    assert masked[0].tolist() == [[1, 1, 1], [-100] * 3] and masked[1][0].tolist() == [1, -100]
    floats = mask_repeats(Batch({"labels": torch.ones(2)}, real=1, size=2))
    assert floats["labels"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="real=3"):
        Batch({}, real=3, size=2)


def test_sources_of_samples():
    datasets = pytest.importorskip("datasets")
    hub = datasets.Dataset.from_list(samples(5))
    expected = [[0, 1], [2, 3], [4]]
    assert [names(batch) for batch in CollieDataLoader(hub, 2)] == expected
    assert [names(batch) for batch in CollieDataLoader(hub.to_iterable_dataset(), 2)] == expected
    tensors = TensorDataset(torch.arange(1, 6).reshape(5, 1))
    loader = CollieDataLoader(tensors, 2, collate_fn=lambda rows: {"input_ids": torch.stack([row[0] for row in rows])})
    assert [names(batch) for batch in loader] == expected


def test_streams_have_no_length_and_start_anew():
    loader = CollieDataLoader(Stream(3), 2)
    with pytest.raises(TypeError, match="Stream has no length"):
        len(loader)
    assert [names(batch) for batch in loader] == [names(batch) for batch in loader] == [[0, 1], [2]]


def test_a_generator_is_read_once():
    loader = CollieDataLoader((sample for sample in samples(2)), 2)
    assert len(list(loader)) == 1
    with pytest.raises(ValueError, match="read once"):
        list(loader)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dataset": []}, ValueError, "dataset is empty"),
        ({"sampler": []}, ValueError, "sampler is empty"),
        ({"dataset": {"train": samples(2)}}, TypeError, r"dict; .*dataset\['train'\]"),
        ({"dataset": 3}, TypeError, "int, which has neither"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": "2"}, TypeError, "batch_size='2'"),
        ({"accumulation_steps": -1}, ValueError, "accumulation_steps=-1"),
        ({"num_workers": -1}, ValueError, "num_workers=-1"),
        ({"collate_fn": 3}, TypeError, "collate_fn=3"),
        ({"drop_last": True, "batch_size": 9}, ValueError, "leaves nothing of 4 samples: a global batch is 9"),
        ({"sampler": [0], "shuffle": True}, ValueError, "exclude each other"),
        ({"sampler": 3}, TypeError, "cannot be iterated"),
        ({"sampler": DistributedSampler(range(4), 2, 0)}, ValueError, "splits .* 2 ranks"),
        ({"dataset": Stream(3), "sampler": [0]}, ValueError, "stream has no indices"),
        ({"data_efficiency_config": [1]}, TypeError, "data_efficiency_config is list"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        CollieDataLoader(**{"dataset": samples(4), "batch_size": 2, **arguments})


def test_set_epoch_wants_a_number():
    with pytest.raises(ValueError, match="epoch='one'"):
        CollieDataLoader(samples(2), 1).set_epoch("one")


def test_documented_parameters():
    parameters = list(inspect.signature(CollieDataLoader).parameters.values())
    expected = {
        "dataset": inspect.Parameter.empty, "batch_size": inspect.Parameter.empty, "accumulation_steps": 1,
        "shuffle": False, "pin_memory": True, "collate_fn": None, "num_workers": None, "sampler": None,
        "drop_last": False, "data_efficiency_config": {},
    }  # fmt: skip
    assert {parameter.name: parameter.default for parameter in parameters} == expected
