"""An engine whose answers are simple arithmetic on the batch, for tests of the loops around it."""

from __future__ import annotations

from torch import nn


class FakeEngine:
    """Records what it is asked; the loss of a batch is the mean of its `x`."""

    def __init__(self, module=None, optimizer=object()):  # noqa: B008 - only its identity counts
        self.module = module if module is not None else nn.Sequential(nn.Linear(1, 1), nn.Dropout())
        self.optimizer, self.lr_scheduler, self.lr = optimizer, None, 0.125
        self.windows, self.trained = [], []

    def begin_step(self, batches, loss_fn):
        self.windows.append([batch["x"].tolist() for batch in batches])

    def train_batch(self, batch, loss_fn):
        self.trained.append(batch["x"].tolist())
        return batch["x"].float().mean().item()

    def eval_loss(self, batch, loss_fn):
        return batch["x"].float().sum().item(), len(batch["x"])

    def train(self, mode=True):
        self.module.train(mode)

    def eval(self):
        self.module.eval()
