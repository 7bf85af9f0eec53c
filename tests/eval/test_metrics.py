"""Metrics: perplexity against plain arithmetic, gathering over ranks, what the wrapper passes on."""

from __future__ import annotations

import math

import pytest
import torch

from collie_eval import BaseMetric, PPLMetric
from collie_eval.metrics.wrapper import _MetricsWrapper
from collie_parallel.config import CollieConfig
from collie_parallel.topology import env, setup_distribution


class Collect(BaseMetric):
    """Keeps what it is given."""

    def __init__(self, gather_result=False):
        super().__init__(gather_result)
        self.seen = []

    def reset(self):
        self.seen = []

    def update(self, result):
        self.seen.append(result)

    def get_metric(self):
        return list(self.seen)


def test_perplexity_is_weighted_by_tokens():
    metric = PPLMetric()
    losses = [[1.0, 2.0, 3.0], [10.0]]
    for batch in losses:
        metric.update({"loss_sum": sum(batch), "tokens": len(batch)})
    assert metric.get_metric() == pytest.approx(math.exp(16.0 / 4))
    metric.reset()
    metric.update({"loss_sum": torch.tensor(2.0), "tokens": torch.tensor(1)})
    assert metric.get_metric() == pytest.approx(math.exp(2.0))


def test_perplexity_of_nothing_and_of_too_much():
    metric = PPLMetric()
    assert math.isnan(metric.get_metric())
    metric.update({"loss_sum": 1e6, "tokens": 1})
    assert metric.get_metric() == math.inf


def test_perplexity_refuses_a_mean_per_batch():
    with pytest.raises(ValueError, match=r"needs 'loss_sum'.*\['loss_sum', 'tokens'\] missing among \['ppl'\]"):
        PPLMetric().update({"ppl": 3.0})


def test_wrapper_constructs_updates_and_resets():
    metric = Collect()
    wrapper = _MetricsWrapper({"seen": metric}, trainer="the trainer")
    assert metric.trainer == "the trainer"
    wrapper.update({"pred": [1]})
    wrapper.update(None)
    assert wrapper.get_metric() == {"seen": [{"pred": [1]}]}
    wrapper.reset()
    assert wrapper.get_metric() == {"seen": []}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [([PPLMetric()], "metrics is list"), ({"ppl": PPLMetric}, r"write PPLMetric\(\)"), ({"x": 3}, "is int")],
)
def test_wrapper_refuses_what_is_no_metric(metrics, message):
    with pytest.raises(TypeError, match=message):
        _MetricsWrapper(metrics, None)


def perplexity_over_ranks(per_rank, gather):
    setup_distribution(CollieConfig(dp_size=2))
    wrapper = _MetricsWrapper({"ppl": PPLMetric(gather_result=gather)}, None)
    for losses in per_rank[env.rank]:
        wrapper.update(None if losses is None else {"loss_sum": sum(losses), "tokens": len(losses)})
    return wrapper.get_metric()["ppl"]


@pytest.mark.distributed
@pytest.mark.parametrize("gather", [False, True])
def test_perplexity_over_ranks_is_that_of_all_tokens(pool2, gather):
    per_rank = [[[1.0, 2.0], [0.5]], [[4.0], None]]
    expected = math.exp(7.5 / 4)
    assert pool2.run(perplexity_over_ranks, per_rank, gather) == pytest.approx([expected, expected])


def gather_uneven():
    setup_distribution(CollieConfig(dp_size=2))
    rank = env.rank
    metric = Collect(gather_result=True)
    both = metric.gather(
        {
            "pred": torch.arange(rank + 1),
            "wide": torch.full((1, rank + 2), rank),
            "text": [f"{rank}"] * (2 - rank),
            "loss": 0.5 + rank,
            "more": {"x": torch.tensor(float(rank))},
        }
    )
    only_one = metric.gather({"pred": [rank]} if rank == 1 else None)
    nobody = metric.gather(None)
    return both, only_one, nobody


@pytest.mark.distributed
def test_gather_joins_what_the_ranks_have_in_rank_order(pool2):
    for both, only_one, nobody in pool2.run(gather_uneven):
        assert both["pred"].tolist() == [0, 0, 1]
        assert [row.tolist() for row in both["wide"]] == [[0, 0], [1, 1, 1]]
        assert both["text"] == ["0", "0", "1"]
        assert both["loss"] == [0.5, 1.5]
        assert [x.item() for x in both["more"]["x"]] == [0.0, 1.0]
        assert only_one == {"pred": [1]}
        assert nobody == {}
