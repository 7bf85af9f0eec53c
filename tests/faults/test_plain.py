"""Faults without a launcher that ends the others, as under srun: three processes that know of each other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.faults.jobs import MESSAGE
from tests.harness.nursery import REPO_ROOT
from tests.harness.script import run_script

RANKS = 3
SOON = 30.0
SHOWN = f"DeliberateError: {MESSAGE}"

# Jobs that end because of rank 1's exception, or of rank 0's.
RAISING = [
    "in_training",
    "others_work",
    "others_in_barrier",
    "first_rank_others_work",
    "thread_stays",
]
OTHERS = [
    "after_first_rank_ended",
    "before_setup",
    "exits_with_code",
    "forked_child",
    "in_loader_worker",
    "interrupted",
    "killed_first_rank",
    "killed_in_training",
    "normal",
    "unprintable",
]


@dataclass(frozen=True)
class Outcome:
    """How a job ended: exit codes by rank, seconds from the fault to the last rank's end, outputs by rank."""

    codes: list[int]
    seconds: float
    hung: list[int]
    left: list[int]
    errors: list[str]
    outputs: list[str]

    @property
    def text(self) -> str:
        return "".join(self.errors)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Outcomes by the name of the job; all jobs have run, and none has left a process."""
    folder = tmp_path_factory.mktemp("jobs")
    path = REPO_ROOT / "tests" / "faults" / "launch.py"
    done = run_script(path, args=[str(folder), str(RANKS), *RAISING, *OTHERS], timeout=280, env=environment())
    assert done.rc == 0, done.stderr
    assert done.survivors == ()

    def read(name: str) -> Outcome:
        fields = json.loads((folder / name / "outcome.json").read_text())
        texts = {
            kind: [(folder / name / f"{kind}.{rank}").read_text(errors="replace") for rank in range(RANKS)]
            for kind in ("stderr", "stdout")
        }
        found = Outcome(**fields, errors=texts["stderr"], outputs=texts["stdout"])
        assert found.hung == [], found.text
        assert found.left == [], found.text
        assert found.seconds < SOON, found.text
        return found

    return read


def environment() -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.mark.parametrize("name", RAISING)
def test_an_exception_ends_all_ranks_and_is_shown_once(outcome: Callable[[str], Outcome], name: str) -> None:
    found = outcome(name)
    assert found.codes == [1] * RANKS, found.text
    assert found.text.count(SHOWN) == 1, found.text
    assert found.text.count("Traceback") == 1, found.text
    failed = 0 if name.startswith("first_rank") else 1
    assert SHOWN in found.errors[failed]
    for rank in {0, 1, 2} - {failed}:
        assert f"[rank {rank}]" in found.errors[rank] and f"rank {failed}" in found.errors[rank], found.errors[rank]


def test_an_exception_in_a_worker_of_the_loader(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("in_loader_worker")
    assert found.codes == [1] * RANKS, found.text
    assert found.text.count(SHOWN) == 1, found.text
    assert found.text.count("Caught DeliberateError in DataLoader worker process 0.") == 1


def test_a_killed_rank_ends_the_others_through_their_collectives(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("killed_in_training")
    assert found.codes == [1, -9, 1], found.text
    assert found.text.count("Traceback") == 1, found.text
    assert "gloo" in found.text  # closed or reset by peer


def test_a_killed_first_rank_takes_the_store_along(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("killed_first_rank")
    assert found.codes == [-9, 1, 1], found.text
    for rank in (1, 2):
        assert f"[rank {rank}] failed:" in found.errors[rank], found.errors[rank]


def test_an_exit_code_reaches_the_launcher(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("exits_with_code")
    assert found.codes == [1, 3, 1], found.text
    assert found.text.count("Traceback") == 1, found.text


def test_an_interrupt_ends_ranks_that_wait_and_ranks_that_work(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("interrupted")
    assert all(code != 0 for code in found.codes), found.text
    assert found.text.count("Traceback") == 1, found.text


def test_a_bad_config_is_told_before_anything_starts(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("before_setup")
    assert found.codes == [1] * RANKS
    for text in found.errors:
        assert text.rstrip().splitlines()[-1].startswith("ValueError: tp_size=4"), text


def test_a_broken_hook_and_an_exception_without_text_end_the_job(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("unprintable")
    assert found.codes == [1] * RANKS
    assert "UnprintableError" in found.errors[1]


def test_a_failure_after_rank_0_has_ended_is_shown(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("after_first_rank_ended")
    assert found.codes == [0, 1, 0], found.text
    assert found.errors[0] == found.errors[2] == ""
    assert found.errors[1].startswith("[rank 1] failed:\n"), found.errors[1]
    assert found.errors[1].count(SHOWN) == 1


def test_a_forked_process_fails_for_itself(outcome: Callable[[str], Outcome]) -> None:
    found = outcome("forked_child")
    assert found.codes == [0] * RANKS, found.text
    assert found.errors[0] == found.errors[2] == ""
    assert found.errors[1].count(SHOWN) == 1


def test_a_normal_end_is_silent_whoever_ends_first(outcome: Callable[[str], Outcome]) -> None:
    """And a thread of the user's that fails has said so, and no more."""
    found = outcome("normal")
    assert found.codes == [0] * RANKS, found.text
    assert found.outputs == ["", "rank 1 is through\n", "rank 2 is through\n"]
    assert found.errors[0] == found.errors[2] == ""
    assert found.errors[1].startswith("Exception in thread") and found.errors[1].count(SHOWN) == 1
