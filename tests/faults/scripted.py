"""One training script for both launchers, and the run in which nothing is compiled."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

STEPS = 4
GLOBAL_BATCH = 4


def losses() -> None:
    """Train with whatever number of ranks there are and print the losses of the optimizer steps on rank 0."""
    from collie import Callback, CollieConfig, Trainer, env
    from tests.harness.batches import collate, ragged_batch
    from tests.harness.models import tiny_model

    class Watch(Callback):
        losses: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: Any, loss: float) -> None:
            if trainer.engine.global_steps > len(self.losses):
                self.losses.append(trainer.engine.step_loss)

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model = tiny_model("llama")
    config = CollieConfig(model_config=model.config, dp_size=world_size, train_epochs=1)
    config.gradient_accumulation_steps = GLOBAL_BATCH // world_size
    config.ds_config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 1}}
    samples = ragged_batch(random.Random(0), STEPS * GLOBAL_BATCH, 2, 9, 67)
    Trainer(model, config, train_dataset=samples, train_dataset_collate_fn=collate, callbacks=[Watch()]).train()
    assert env.world_size == world_size
    if env.rank == 0:
        print("losses", *Watch.losses)


def compiles_nothing() -> None:
    """A step with each of DeepSpeed's ways to hold an AdamW, and with its clipping and scheduler."""
    from collie_parallel.config import CollieConfig
    from collie_parallel.engine import setup_engine
    from collie_parallel.losses import GPTLMLoss
    from collie_parallel.topology import env
    from tests.harness.batches import collate, ragged_batch
    from tests.harness.models import tiny_model

    for stage, offload in ((0, ""), (1, ""), (2, ""), (3, ""), (1, "optimizer"), (2, "optimizer"), (3, "both")):
        zero: dict[str, Any] = {"stage": stage}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if offload == "both":
            zero["offload_param"] = {"device": "cpu"}
        model = tiny_model("llama")
        config = CollieConfig(model_config=model.config, dp_size=env.world_size)
        config.ds_config = {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": stage > 0},
            "zero_optimization": zero,
        }
        engine = setup_engine(config, model)
        batch = collate(ragged_batch(random.Random(0), 2, 4, 9, 67))
        for _ in range(2):
            engine.train_batch(batch, GPTLMLoss())
        print("trained", stage, offload)


if __name__ == "__main__":
    {"losses": losses, "compiles_nothing": compiles_nothing}[sys.argv[1]]()
