"""Jobs in which something goes wrong: `python jobs.py NAME FOLDER` is one rank of the job NAME.

The rank that fails writes the time to FOLDER/failed_at just before; the exceptions carry MESSAGE.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

MESSAGE = "the deliberate fault"
LONG = 120.0  # seconds of work that nobody waits for


class DeliberateError(Exception):
    """Raised by the failing rank."""


class UnprintableError(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Job:
    """One rank's share of the jobs. `folder` is the same for all ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))

    # -- building blocks ----------------------------------------------------------------------------------------------

    def fail(self) -> NoReturn:
        self.mark()
        raise DeliberateError(MESSAGE)

    def mark(self) -> None:
        (self.folder / "failed_at").write_text(str(time.time()))

    def kill(self) -> None:
        self.mark()
        os.kill(os.getpid(), signal.SIGKILL)

    def setup(self) -> None:
        from collie_parallel.config import CollieConfig
        from collie_parallel.topology import env, setup_distribution

        setup_distribution(CollieConfig(dp_size=self.world_size))
        env.barrier()

    def work(self, seconds: float = LONG) -> None:
        """Python code that calls no collective."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
            time.sleep(0.01)

    def barrier(self) -> None:
        from collie_parallel.topology import env

        env.barrier()

    def train(self, fault: Callable[[], Any] | None, failing: int = 1, workers: int = 0, bad_sample: int = -1) -> None:
        """Train for long; on rank `failing` the fourth batch begins with `fault`."""
        from collie_parallel.config import CollieConfig
        from collie_train.callbacks.callback import Callback
        from collie_train.trainer import Trainer
        from tests.harness.batches import collate, ragged_batch
        from tests.harness.models import tiny_model

        job = self

        class Fault(Callback):
            def on_train_batch_begin(self, trainer: Any, batch: Any) -> None:
                if fault is not None and job.rank == failing and trainer.global_batch_idx == 3:
                    fault()

        class Samples(list):  # type: ignore[type-arg]
            def __getitem__(self, index: Any) -> Any:
                if index == bad_sample:
                    job.fail()
                return super().__getitem__(index)

        model = tiny_model("llama")
        config = CollieConfig(model_config=model.config, dp_size=self.world_size, train_epochs=100_000)
        config.dataloader_num_workers = workers
        config.ds_config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}
        samples = Samples(ragged_batch(random.Random(0), 64, 2, 9, 67))
        Trainer(model, config, train_dataset=samples, train_dataset_collate_fn=collate, callbacks=[Fault()]).train()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def in_training(self) -> None:
        self.train(self.fail)

    def killed_in_training(self) -> None:
        self.train(self.kill)

    def killed_first_rank(self) -> None:
        self.train(self.kill, failing=0)

    def in_loader_worker(self) -> None:
        """Every sample is read by one of the ranks, the bad one by one rank's worker."""
        self.train(None, workers=1, bad_sample=33)

    def others_work(self) -> None:
        self.setup()
        if self.rank == 1:
            self.fail()
        self.work()

    def others_in_barrier(self) -> None:
        self.setup()
        if self.rank == 1:
            self.work(1.0)
            self.fail()
        self.barrier()

    def first_rank_others_work(self) -> None:
        self.setup()
        if self.rank == 0:
            self.fail()
        self.work()

    def first_rank_others_in_barrier(self) -> None:
        self.setup()
        if self.rank == 0:
            self.work(1.0)
            self.fail()
        self.barrier()

    def exits_with_code(self) -> None:
        self.setup()
        if self.rank == 1:
            self.mark()
            sys.exit(3)
        self.barrier()

    def interrupted(self) -> None:
        """As from a terminal: torchrun gets the signal and passes it on, else every rank gets it."""
        self.setup()
        if self.rank == 1:
            self.work(1.0)
            self.mark()
            if "TORCHELASTIC_RUN_ID" in os.environ:
                os.kill(os.getppid(), signal.SIGINT)
            else:
                os.killpg(0, signal.SIGINT)
        if self.rank == 0:
            self.barrier()
        self.work()

    def unprintable(self) -> None:
        def broken_hook(*_: Any) -> None:
            raise ValueError("the hook is broken")

        sys.excepthook = broken_hook
        self.setup()
        if self.rank == 1:
            self.mark()
            raise UnprintableError
        self.work()

    def thread_stays(self) -> None:
        """The failing rank has a thread that does not end; Python would wait for it."""
        self.setup()
        if self.rank == 1:
            threading.Thread(target=self.work).start()
            self.fail()
        self.barrier()

    def before_setup(self) -> None:
        from collie_parallel.config import CollieConfig
        from collie_parallel.topology import setup_distribution

        self.mark()
        setup_distribution(CollieConfig(tp_size=self.world_size + 1))

    def normal(self) -> None:
        """Rank 0 ends before the others, who have work left; a thread's exception is the thread's own affair."""
        self.setup()
        if self.rank == 0:
            return
        if self.rank == 1:
            thread = threading.Thread(target=self.fail)
            thread.start()
            thread.join()
        self.work(4.0)
        print(f"rank {self.rank} is through", flush=True)

    def after_first_rank_ended(self) -> None:
        """The store is gone with rank 0 by the time that rank 1 fails."""
        self.setup()
        if self.rank == 1:
            self.work(3.0)
            self.fail()

    def forked_child(self) -> None:
        """A process that a rank forked fails; the rank does not."""
        self.setup()
        if self.rank == 1:
            child = os.fork()
            if child == 0:
                self.fail()
            os.waitpid(child, 0)
        self.work(3.0)


def run(name: str, folder: str) -> None:
    """Be one rank of the job."""
    getattr(Job(Path(folder)), name)()


if __name__ == "__main__":
    run(*sys.argv[1:])
