"""The pool of ranks keeps its promises: order, tracebacks, restarts, stacks of a hang, no start-up paid twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.nursery import REPO_ROOT
from tests.harness.pool import RankError, RankPool
from tests.harness_tests import cases

pytestmark = pytest.mark.distributed


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_results_come_in_rank_order(pool4: RankPool) -> None:
    assert pool4.run(cases.rank_and, "x") == [(0, "x"), (1, "x"), (2, "x"), (3, "x")]


def test_one_rank_is_a_world_too(pool1: RankPool) -> None:
    assert pool1.run(cases.rank_and, 1) == [(0, 1)]


def test_ranks_see_the_launcher_variables_and_one_thread(pool2: RankPool) -> None:
    for rank, seen in enumerate(pool2.run(cases.surroundings)):
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "threads": 1,
            "backend": "gloo",
            "cuda": False,
        }


def test_tensors_travel_both_ways(pool2: RankPool) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    for result in pool2.run(cases.all_reduced, tensor, scale=3.0):
        torch.testing.assert_close(result, tensor * 6.0)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.integers(-1000, 1000), min_size=1, max_size=5))
def test_hypothesis_drives_one_pool(pool2: RankPool, numbers: list[int]) -> None:
    pool2.start()
    before = pool2.pids
    started = time.monotonic()
    results = pool2.run(cases.all_reduced, torch.tensor(numbers), scale=1)
    assert time.monotonic() - started < 2.0, "start-up was paid again"
    assert [result.tolist() for result in results] == [[2 * number for number in numbers]] * 2
    assert pool2.pids == before


def test_an_exception_shows_its_traceback_and_the_next_case_gets_new_ranks(pool2: RankPool) -> None:
    pool2.start()
    before = pool2.pids
    with pytest.raises(RankError) as caught:
        pool2.run(cases.fail_on, 1)
    error, text = caught.value, str(caught.value)
    assert (error.rank, error.kind, error.type_name) == (1, "exception", "KeyError")
    assert "the seventh seal" in text and "in fail_on" in text
    assert "note: rank 0 had not finished" in text and "barrier" in text
    assert "last output of rank 1" in text and "about to fail" in text
    assert not any(alive(pid) for pid in before)
    started = time.monotonic()
    assert pool2.run(cases.rank_and, 5) == [(0, 5), (1, 5)]
    assert time.monotonic() - started < 5.0
    assert not set(before) & set(pool2.pids)


def test_the_first_failure_is_told_first(pool2: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool2.run(cases.fail_one_after_the_other, first=1)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.index("rank 1 raised") < text.index("note: rank 0 raised ValueError: rank 0 fails")


def test_a_failing_assert_shows_the_values(pool2: RankPool) -> None:
    with pytest.raises(RankError, match=r"found = \[1, 2\]"):
        pool2.run(cases.wrong_assertion)


def test_a_hang_ends_with_the_stacks_of_all_ranks(pool2: RankPool) -> None:
    pool2.start()
    before, started = pool2.pids, time.monotonic()
    with pytest.raises(RankError) as caught:
        pool2.run(cases.hang_on, 1, timeout=1.0)
    assert time.monotonic() - started < 10.0
    text = str(caught.value)
    assert caught.value.kind == "timeout"
    assert "not finished after 1 s on rank(s) [0, 1]" in text
    assert "sleep_for_ever" in caught.value.failures[1] and "sleep_for_ever" in text
    assert "barrier" in caught.value.failures[0]
    assert not any(alive(pid) for pid in before)


def test_a_killed_rank_is_named_with_its_signal(pool2: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)") as caught:
        pool2.run(cases.kill_on, 1)
    assert (caught.value.rank, caught.value.kind) == (1, "death")


def test_a_rank_that_exits_is_named_with_its_code(pool2: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 ended with exit code 7"):
        pool2.run(cases.exit_on, 0)
    assert pool2.run(cases.rank_and, 0) == [(0, 0), (1, 0)]


def test_a_rank_that_dies_between_cases_is_noticed(pool2: RankPool) -> None:
    pool2.start()
    os.kill(pool2.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 was killed by signal 9"):
        pool2.run(cases.rank_and, 0)


def test_a_result_that_cannot_travel_is_an_error_of_the_case(pool2: RankPool) -> None:
    with pytest.raises(RankError, match="pickle"):
        pool2.run(cases.unpicklable)


def test_a_function_without_an_address_is_refused(pool2: RankPool) -> None:
    with pytest.raises(ValueError, match="top-level"):
        pool2.run(lambda: None)


def test_each_case_starts_from_the_same_state(pool2: RankPool) -> None:
    first = pool2.run(cases.draw_and_disturb)
    assert pool2.run(cases.draw_and_disturb) == first
    assert [groups for _, groups in first] == [1, 1], "groups of earlier cases are gone"


def test_ranks_that_pile_up_descriptors_are_replaced(pool2: RankPool) -> None:
    pool2.start()
    before = pool2.pids
    assert pool2.run(cases.open_and_forget, 10) == [10, 10]
    assert pool2.pids == before
    assert pool2.run(cases.open_and_forget, 500) == [500, 500]
    assert pool2.run(cases.rank_and, 1) == [(0, 1), (1, 1)]
    assert not set(before) & set(pool2.pids)


def test_what_a_rank_started_dies_with_it(pool2: RankPool) -> None:
    children = pool2.run(cases.start_a_child)
    assert all(alive(pid) for pid in children)
    pool2.kill()
    deadline = time.monotonic() + 5.0
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_ranks_end_when_the_caller_is_killed() -> None:
    code = (
        "from tests.harness.nursery import Nursery\n"
        "from tests.harness.pool import RankPool\n"
        "import time\n"
        "pool = RankPool(2, Nursery(['torch.distributed']))\n"
        "pool.start()\n"
        "print(*pool.pids, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        caller.kill()
    deadline = time.monotonic() + 10.0
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
